"""Which device passes on which part of the weights, and sums which part of the gradients."""

import itertools

import pytest

from keras_multigpu.engines.tensorflow.hubs import divide, shares_back, shares_out


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("find", [shares_out, shares_back])
def test_shares_add_up_to_one(find, count):
    devices = [f"gpu:{number}" for number in range(count)]
    for home in ("gpu:0", "elsewhere"):
        assert sum(find(devices, home).values()) == pytest.approx(1)


def test_parts_cover_every_weight_once():
    sizes = {1: 1_000_000, 2: 300_000, 3: 5, 4: 0}
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    parts = divide(sizes, shares)
    assert parts.keys() == sizes.keys()
    for key, size in sizes.items():
        ends = [(part.start, part.stop) for part in parts[key]]
        assert ends[0][0] == 0
        assert ends[-1][1] == size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    of_hub = dict.fromkeys(shares, 0)
    for found in parts.values():
        for part in found:
            of_hub[part.hub] += part.stop - part.start
    for hub, share in shares.items():
        assert of_hub[hub] == pytest.approx(share * sum(sizes.values()), rel=0.1)
