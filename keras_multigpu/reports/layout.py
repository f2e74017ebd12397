"""Lays out the plot of a placement: calls as blocks, blocks as boxes on a grid, lines beside them.

All lengths are in inches.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.graphs.graph import Graph

WIDTH, HEIGHT = 2.2, 0.4  # of a box
_COLUMNS, _ROWS = 4, 15  # at most
_ROWS_OF_A_PAGE = 11  # longer plots are continued beside, where there is room
_PORT = 0.2  # between two lines at a box
_LABEL, _ARROW = 0.17, 0.13  # what lines leave free below and above a box

Point = tuple[float, float]
Cell = tuple[int, int]
Turns = tuple[int, int, int]  # a channel, a gutter, a channel
Spans = Mapping[int, Mapping[int, list[float]]]  # where lines begin and end, by lane and net


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
    names = [re.sub(r"([A-Za-z])_(\d)", r"\1\2", "/".join(call.path)) for call in graph.calls]
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
    names = ["/".join(call.path) for call in graph.calls]
    own = names[block.start : block.stop]
    ends = [name.rpartition("/")[2] for name in (own[0], own[-1])]
    if len(set(own)) == 1:
        return _shorten(ends[0], 34)
    common = re.match(".*[/_]", "".join(_shared(min(own), max(own))))
    if common and sum(name.startswith(common[0]) for name in names) == len(own):
        return _shorten(common[0][:-1], 34)
    return " … ".join(_shorten(name, 16) for name in ends)


def _shared(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """What both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return [part for part, _ in pairs]


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


class Net(NamedTuple):
    """Lines from one box to others, which share their first part."""

    source: int
    targets: tuple[int, ...]
    crosses: bool  # to other devices; these leave a box right of its other lines


def place_boxes(makers: Sequence[Collection[int]]) -> list[Cell]:
    """The column and row of each box, below those that it takes from: `makers`, by their index."""
    for columns in (_COLUMNS, 2, 1):
        cells = _fill(makers, columns)
        width, height = (max(places) + 1 for places in zip(*cells))
        pages = min(_COLUMNS // width, math.ceil(height / _ROWS_OF_A_PAGE))
        rows = math.ceil(height / pages)
        if rows <= _ROWS:
            break
    return [(column + width * (row // rows), row % rows) for column, row in cells]


def _fill(makers: Sequence[Collection[int]], columns: int) -> list[Cell]:
    cells: list[Cell] = []
    for before in makers:
        wanted = round(sum(cells[one][0] for one in before) / len(before)) if before else 0
        nearest = sorted(range(columns), key=lambda column: (abs(column - wanted), -column))
        first = max((cells[one][1] + 1 for one in before), default=0)
        free = ((column, row) for row in itertools.count(first) for column in nearest)
        cells.append(next(cell for cell in free if cell not in cells))
    return cells


def route(
    cells: Sequence[Cell], nets: Sequence[Net]
) -> tuple[list[Point], list[list[list[Point]]], Point]:
    """The boxes' centers, the corners of each net's lines, and the size of the plot.

    A line goes straight down to the next box. Others run in the channel below the row of their
    source, the gutter beside the column of their target, and the channel above the row of their
    target. Each net has its own lanes there, but nets whose only target is the same share them.
    """
    shared = {(net.targets, net.crosses): number for number, net in enumerate(nets)}
    tracks = [
        number if len(net.targets) > 1 else shared[net.targets, net.crosses]
        for number, net in enumerate(nets)
    ]
    straight: dict[int, int] = {}  # by target
    bent: dict[tuple[int, int], Turns] = {}
    for number, net in enumerate(nets):
        column, row = cells[net.source]
        for target in net.targets:
            below, last = cells[target]
            if (column, row + 1) == (below, last) and target not in straight:
                straight[target] = number
            else:
                bent[number, target] = (row + 1, below if column < below else below + 1, last)
    gutters, channels, entries = _find_spans(cells, nets, bent, tracks)
    columns, rows = (max(places) + 1 for places in zip(*cells))
    xs, x_lanes, width = _lay_out(gutters, columns, WIDTH, 0.15, 0.15)
    ys, y_lanes, height = _lay_out(channels, rows, HEIGHT, _LABEL, _ARROW)
    counts = collections.Counter(net.source for net in nets)
    lines: list[list[list[Point]]] = [[] for _ in nets]
    for number, net in enumerate(nets):
        column, row = cells[net.source]
        for target in net.targets:
            start, end = xs[column], xs[cells[target][0]]
            bottom, top = ys[row] + HEIGHT / 2, ys[cells[target][1]] - HEIGHT / 2 - 0.02
            if counts[net.source] > 1 and number not in straight.values():
                start += _PORT if net.crosses else -_PORT
            corners: list[Point] = []
            if (number, target) in bent:
                (first, gutter, last), track = bent[number, target], tracks[number]
                end += _port(entries[target, False], entries[target, True], track)
                x = x_lanes.get((gutter, track), end)
                upper, lower = y_lanes[first, track], y_lanes[last, track]
                corners = [(start, upper), (x, upper), (x, lower), (end, lower)]
            lines[number].append([(start, bottom), *corners, (end, top)])
    return [(xs[column], ys[row]) for column, row in cells], lines, (width, height)


def _find_spans(
    cells: Sequence[Cell],
    nets: Sequence[Net],
    bent: Mapping[tuple[int, int], Turns],
    tracks: Sequence[int],
) -> tuple[Spans, Spans, dict[tuple[int, bool], list[int]]]:
    """The spans in gutters and in channels, and the tracks that enter a box from left and right."""
    gutters, channels = (
        collections.defaultdict[int, Any](lambda: collections.defaultdict(list)) for _ in range(2)
    )
    entries: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)
    for (number, target), (first, gutter, last) in bent.items():
        track, below = tracks[number], cells[target][0]
        entered = entries[target, gutter > below]
        entered += [track] * (track not in entered)
        channels[first][track] += [cells[nets[number].source][0] + 0.5, gutter]
        channels[last][track] += [gutter, below + 0.5]
        if first != last:
            gutters[gutter][track] += [first, last]
    return gutters, channels, entries


def _port(left: Sequence[int], right: Sequence[int], number: int) -> float:
    """Where a net enters a box, from the middle, which is for the line straight down."""
    step = min(_PORT, 0.9 * WIDTH / 2 / max(len(left), len(right)))
    if number in right:
        return (right.index(number) + 0.5) * step
    return -(left.index(number) + 0.5) * step


def _lay_out(
    spans: Spans, boxes: int, length: float, before: float, after: float
) -> tuple[list[float], dict[tuple[int, int], float], float]:
    """Along an axis: the middles of boxes, the lanes between them by place and net, the length."""
    middles, lanes, position = [], {}, 0.0
    for place in range(boxes + 1):
        numbers: dict[int, int] = {}
        ends: list[float] = []  # of each lane; nets that don't meet share one
        for net, stops in sorted(spans[place].items(), key=lambda item: min(item[1])):
            free = (lane for lane, end in enumerate(ends) if end < min(stops))
            numbers[net] = next(free, len(ends))
            ends[numbers[net] : numbers[net] + 1] = [max(stops)]
        width = min(0.25, 0.06 * max(1, len(ends)))
        for net, lane in numbers.items():
            lanes[place, net] = position + before + (lane + 0.5) * width / len(ends)
        position += before + width + after + length
        middles.append(position - length / 2)
    return middles[:boxes], lanes, position - length
