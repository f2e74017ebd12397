"""Places the boxes of a plot on a grid, and routes lines beside them; all lengths are in inches."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 2.2, 0.4  # of a box
_COLUMNS, _ROWS = 4, 15  # at most
_ROWS_OF_A_PAGE = 11  # longer plots are continued beside, where there is room
_PORT = 0.2  # between two lines at a box
_LABEL, _ARROW = 0.17, 0.13  # what lines leave free below and above a box

Point = tuple[float, float]
Cell = tuple[int, int]


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
    bent: dict[tuple[int, int], tuple[int, int, int]] = {}  # channel, gutter, channel
    gutters, channels = _spans(), _spans()
    entries: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)
    for number, net in enumerate(nets):
        column, row = cells[net.source]
        for target in net.targets:
            below, last = cells[target]
            if (column, row + 1) == (below, last) and target not in straight:
                straight[target] = number
                continue
            gutter = below if column < below else below + 1
            bent[number, target] = (row + 1, gutter, last)
            track, entered = tracks[number], entries[target, gutter > below]
            entered += [track] * (track not in entered)
            channels[row + 1][track] += [column + 0.5, gutter]
            channels[last][track] += [gutter, below + 0.5]
            if row + 1 != last:
                gutters[gutter][track] += [row + 1, last]
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


# By gutter or channel, and by net: where its lines begin and end.
Spans = dict[int, dict[int, list[float]]]


def _spans() -> Spans:
    return collections.defaultdict(lambda: collections.defaultdict(list))


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
