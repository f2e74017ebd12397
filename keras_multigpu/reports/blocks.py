"""Groups the calls of a deep graph into blocks, few enough for one picture."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

from keras_multigpu.graphs.graph import Graph, LayerCall


def find_blocks(graph: Graph, numbers: Sequence[int], most: int) -> list[range]:
    """Divides the calls, in their order, into at most `most` blocks.

    A graph of at most `most` calls has a block for each. Otherwise blocks are of similar size, and
    are cut where the device changes, few tensors pass and names have little in common: between
    `block3a_add` and `block3b_conv`, or between two residual blocks. Only if devices change more
    often than that do blocks have several devices. The last call, the loss, is a block alone.
    """
    count = len(graph.calls)
    if count <= most:
        return [range(place, place + 1) for place in range(count)]
    forced = {place for place in range(1, count) if numbers[place] != numbers[place - 1]}
    forced = (forced if len(forced) < most - 1 else set()) | {count - 1}
    size = 1.5 * count / most
    costs = _cut_costs(graph, window=max(5, round(size)))
    while len(blocks := _divide(costs, forced, size)) > most:
        size *= 1.1
    return blocks


def _divide(costs: Sequence[float], forced: Collection[int], size: float) -> list[range]:
    """The cheapest division into blocks of about `size` calls, by dynamic programming.

    A block of twice that size costs 1.
    """
    best: list[tuple[float, list[range]]] = [(0.0, [])]
    for end in range(1, len(costs) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            balance = ((end - start - size) / size) ** 2
            options.append((best[start][0] + costs[start] + balance, start))
            if start in forced:
                break
        cost, start = min(options)
        best.append((cost, [*best[start][1], range(start, end)]))
    return best[-1][1]


def _cut_costs(graph: Graph, window: int) -> list[float]:
    """The cost of a cut before each call: 2 for each tensor that passes and part of a shared name.

    It counts from the lowest within `window` calls, so that each branch is cut at its own waists.
    """
    producers = graph.producers()
    # A number belongs to the word before it: `dense_1` is one part.
    names = [re.sub(r"([A-Za-z])_(\d)", r"\1\2", name) for name in _names(graph.calls)]
    parts = [re.split("[/_]", name) for name in names]
    costs = [0.0] * len(parts)
    last: dict[int, int] = {}  # the last call that takes from a call
    for place, call in enumerate(graph.calls):
        makers = {producers.get(id(tensor), -1) for tensor in call.inputs}  # -1: the inputs
        last |= dict.fromkeys(makers, place)
        starts_branch = place - 1 not in makers
        costs[place] = 2 * len(_shared(parts[place - 1], parts[place])) - starts_branch
    for maker, taker in last.items():
        for place in range(maker + 1, taker + 1):
            costs[place] += 2
    lowest = [min(costs[max(0, n - window) : n + window + 1]) for n in range(len(costs))]
    return [cost - low for cost, low in zip(costs, lowest)]


def block_name(graph: Graph, block: range) -> str:
    """A call's own name; what a block's names, and no others, begin with; or the first and last."""
    names = _names(graph.calls)
    own = names[block.start : block.stop]
    ends = [name.rpartition("/")[2] for name in (own[0], own[-1])]
    if len(set(own)) == 1:
        return _shorten(ends[0], 34)
    common = re.match(".*[/_]", "".join(_shared(min(own), max(own))))
    if common and sum(name.startswith(common[0]) for name in names) == len(own):
        return _shorten(common[0][:-1], 34)
    return " … ".join(_shorten(name, 16) for name in ends)


def _names(calls: Iterable[LayerCall]) -> list[str]:
    return ["/".join(call.path) for call in calls]


def _shared(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """What both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return [part for part, _ in pairs]


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
