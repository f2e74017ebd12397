"""Lays out the plot of a placement: calls as blocks, blocks as boxes in rows, lines between them.

All lengths are in inches.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from keras_multigpu.graphs.graph import Graph

WIDTH, HEIGHT = 2.2, 0.4  # of a box
_MOST_IN_ROW = 4
_GAP, _LANE = 0.15, 0.1  # between boxes; between the lines that pass beside them
_BETWEEN = 0.2  # two rows: at least

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
    boxes: int, lines: Collection[Line]
) -> tuple[list[Point], dict[Line, list[Point]], Point]:
    """The boxes' centers, the points that each line goes through, and the size of the picture.

    Boxes come in an order in which each is after those that it takes from. A box is in a row below
    these. A line that passes a row goes straight down there, in a lane between the boxes, so that
    no line crosses a box (Sugiyama, Tagawa and Toda, 1981).
    """
    rows = _rows(boxes, lines)
    ways = {line: list(_way(line, rows)) for line in lines}
    above: dict[tuple, set[int]] = {(rows[box], box): set() for box in range(boxes)}
    for (maker, _, _), way in ways.items():
        for slot in way[1:]:
            above.setdefault(slot, set()).add(maker)
    places: dict[tuple, float] = {}
    heights, height = {}, 0.0
    for row in range(max(rows) + 1):
        slots = [one for one in above if one[0] == row]
        makers = {one: [places[rows[box], box] for box in above[one]] for one in slots}
        places |= _place(slots, makers)
        height += _BETWEEN + min(0.03 * (len(slots) - 1), 0.4) if row else 0.0
        heights[row], height = height + HEIGHT / 2, height + HEIGHT
    left = min(x - _width(one) / 2 for one, x in places.items())
    right = max(x + _width(one) / 2 for one, x in places.items())
    points = {one: (x - left, heights[one[0]]) for one, x in places.items()}
    centers = [points[row, box] for box, row in enumerate(rows)]
    paths = {line: [points[slot] for slot in way] for line, way in ways.items()}
    return centers, paths, (right - left, height)


def _rows(boxes: int, lines: Collection[Line]) -> list[int]:
    """The row of each box: the first one below those that it takes from that has room."""
    found: list[int] = []
    for box in range(boxes):
        row = max((found[maker] + 1 for maker, taker, _ in lines if taker == box), default=0)
        while found.count(row) >= _MOST_IN_ROW:
            row += 1
        found.append(row)
    return found


def _way(line: Line, rows: Sequence[int]) -> Iterator[tuple]:
    """The slots that a line goes through; lines from one box share their lanes."""
    maker, taker, crosses = line
    yield rows[maker], maker
    yield from ((row, maker, crosses) for row in range(rows[maker] + 1, rows[taker]))
    yield rows[taker], taker


def _width(slot: tuple) -> float:
    return WIDTH + _GAP if len(slot) == 2 else _LANE


def _place(slots: Sequence[tuple], makers: Mapping[tuple, Sequence[float]]) -> dict[tuple, float]:
    """Places the slots of a row side by side, each near the middle of its makers."""
    wanted = {one: sum(xs) / len(xs) if xs else 0.0 for one, xs in makers.items()}
    found: dict[tuple, float] = {}
    end = -float("inf")
    for one in sorted(slots, key=lambda one: (wanted[one], len(one))):
        found[one] = max(wanted[one], end + _width(one) / 2)
        end = found[one] + _width(one) / 2
    moved = [wanted[one] - x for one, x in found.items() if len(one) == 2]
    shift = sum(moved) / max(len(moved), 1)
    return {one: x + shift for one, x in found.items()}
