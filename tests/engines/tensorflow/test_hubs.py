"""Which device passes on which part of the weights, and sums which part of the gradients."""

import itertools

import pytest

from keras_multigpu.engines.tensorflow.weights.hubs import divide, shares_of


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("home", ["gpu:0", "gpu:1", "elsewhere"])
def test_no_device_sends_much_more_than_the_others(count, home):
    names = [f"gpu:{number}" for number in range(count)]
    every = {*names, home}
    sent = dict.fromkeys(every, 0.0)
    out, back = (shares_of(names, home, back=one) for one in (False, True))
    assert sum(out.values()) == pytest.approx(1)
    assert sum(back.values()) == pytest.approx(1)
    for hub, share in out.items():
        sent[home] += share
        sent[hub] += (len(every) - 2) * share
    for hub, share in back.items():
        for device in every:
            sent[device] += share * (device != hub)
        sent[hub] += share * (hub != home)
    assert max(sent.values()) < 1.15 * 2 * (len(every) - 1) / len(every)


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
