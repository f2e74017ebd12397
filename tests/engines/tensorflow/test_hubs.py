"""Which device passes on which part of the weights, and sums which part of the gradients."""

import itertools

import pytest

from keras_multigpu.engines.tensorflow.weights.hubs import divide, shares_back, shares_out


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("find", [shares_out, shares_back])
@pytest.mark.parametrize("kind", ["one", "even", "two", "none"])
def test_shares_add_up_to_one(find, count, kind):
    stored = {"one": [9], "even": [9] * count, "two": [6, 3], "none": []}[kind]
    loads = {f"gpu:{number}": load for number, load in enumerate((stored + [0] * count)[:count])}
    for home in ("gpu:0", "elsewhere"):
        assert sum(find(loads, home).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "stored", [[90, 0, 0, 0], [30, 30, 30, 30], [40, 40, 0, 0], [70, 10, 5, 5]]
)
def test_no_device_sends_much_more_than_the_others(stored):
    loads = {f"gpu:{number}": load for number, load in enumerate(stored)}
    count, total = len(loads), sum(stored)
    sent = dict.fromkeys(loads, 0.0)
    for home, load in loads.items():
        for hub, share in shares_out(loads, home).items():
            sent[home] += (count - 1 if hub == home else 1) * share * load
            sent[hub] += (count - 2 if hub != home else 0) * share * load
        for hub, share in shares_back(loads, home).items():
            for device in loads:
                sent[device] += share * load * (device != hub)
            sent[hub] += share * load * (hub != home)
    assert max(sent.values()) < 1.15 * 2 * total * (count - 1) / count


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
