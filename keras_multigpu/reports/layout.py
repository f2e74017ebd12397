"""Lays out the plot of a placement: calls as blocks, blocks as boxes in columns, and lines.

All lengths are in inches.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Sequence

from keras_multigpu.graphs.graph import Graph

WIDTH, HEIGHT = 2.2, 0.4  # of a box
_GAP, _LANE = 0.15, 0.1  # between boxes; between the lines that pass beside them
_BETWEEN = 0.26  # two rows

Point = tuple[float, float]
Line = tuple[int, int, bool]  # from a box to another; whether it crosses to another device


def find_blocks(graph: Graph, numbers: Sequence[int], most: int) -> list[range]:
    """Divides the calls, in their order, into at most `most` blocks; the last, the loss, is alone.

    A graph of at most `most` calls has a block for each. Otherwise it is cut where the device
    changes, few tensors pass and names have little in common: between `block3a_add` and
    `block3b_conv`, or between two residual blocks. If that leaves too many, small neighbours are
    joined; those on different devices last.
    """
    count = len(graph.calls)
    costs = _cut_costs(graph)
    forced = {p for p in range(1, count) if numbers[p] != numbers[p - 1]} | {0, count - 1}
    cuts = list(range(count))
    for limit in sorted(set(costs)) if count > most else ():
        cuts = [place for place in range(count) if place in forced or costs[place] <= limit]
        if 2 * len(cuts) >= most:
            break
    blocks = [range(*ends) for ends in zip(cuts, [*cuts[1:], count])]

    def effort(first: int) -> tuple[bool, int]:
        one, other = blocks[first], blocks[first + 1]
        return numbers[one[-1]] != numbers[other[0]], len(one) + len(other)

    while len(blocks) > most:
        first = min(range(len(blocks) - 2), key=effort)
        blocks[first : first + 2] = [range(blocks[first].start, blocks[first + 1].stop)]
    return blocks


def _cut_costs(graph: Graph) -> list[int]:
    """The cost of a cut before each call: the tensors that pass, and the parts of a shared name."""
    producers = graph.producers()
    # A number belongs to the word before it: `dense_1` is one part.
    names = [re.sub(r"([A-Za-z])_(\d)", r"\1\2", "/".join(call.path)) for call in graph.calls]
    last: dict[int, int] = {}  # the last call that takes from a call; -1: the inputs
    for place, call in enumerate(graph.calls):
        last |= {producers.get(id(tensor), -1): place for tensor in call.inputs}
    passing = collections.Counter(p for maker in last for p in range(maker + 1, last[maker] + 1))
    shared = [len(re.findall("[/_]", _common(*pair))) for pair in itertools.pairwise(names)]
    return [passing[place] + one for place, one in enumerate([0, *shared])]


def block_name(graph: Graph, block: range) -> str:
    """A call's own name; what a block's names, and no others, begin with; or the first and last."""
    names = ["/".join(call.path) for call in graph.calls]
    own = names[block.start : block.stop]
    ends = [name.rpartition("/")[2] for name in (own[0], own[-1])]
    if len(set(own)) == 1:
        return _shorten(ends[0], 34)
    common = re.match(".*[/_]", _common(min(own), max(own)))
    if common and sum(name.startswith(common[0]) for name in names) == len(own):
        return _shorten(common[0][:-1], 34)
    return " … ".join(_shorten(name, 16) for name in ends)


def _common(first: str, second: str) -> str:
    """What both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return "".join(letter for letter, _ in pairs)


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


def arrange(
    columns: Sequence[int], lines: Collection[Line]
) -> tuple[list[Point], dict[Line, list[Point]], Point]:
    """The boxes' centers, the points that each line goes through, and the size of the picture.

    Boxes have their columns. They come in an order in which each is after those that it takes from,
    and is in a row below these. A line that passes a row goes straight down there, in a lane beside
    the column that it comes from, so that no line crosses a box.
    """
    rows: list[int] = []
    for box, column in enumerate(columns):
        row = max((rows[maker] + 1 for maker, taker, _ in lines if taker == box), default=0)
        while (row, column) in zip(rows, columns):
            row += 1
        rows.append(row)
    ways = {line: range(rows[line[0]] + 1, rows[line[1]]) for line in lines}
    # Lines from one box share a lane.
    lanes = dict.fromkeys((maker, crosses) for (maker, _, crosses), way in ways.items() if way)
    beside, right = {}, 0.0
    middles = []
    for column in range(max(columns) + 1):
        middles.append(right + (WIDTH + _GAP) / 2)
        right += WIDTH + _GAP
        for lane in (one for one in lanes if columns[one[0]] == column):
            beside[lane] = right + _LANE / 2
            right += _LANE
    heights = [row * (HEIGHT + _BETWEEN) + HEIGHT / 2 for row in range(max(rows) + 1)]
    centers = [(middles[column], heights[row]) for row, column in zip(rows, columns)]
    paths = {
        (maker, taker, crosses): [
            centers[maker],
            *((beside[maker, crosses], heights[row]) for row in way),
            centers[taker],
        ]
        for (maker, taker, crosses), way in ways.items()
    }
    return centers, paths, (right, heights[-1] + HEIGHT / 2)
