"""A plot of mode `"model"`: which device each layer is on, and what crosses.

Layer calls are drawn as blocks, blocks as boxes in columns. All lengths are in inches.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.arguments import positive_integer
from keras_multigpu.graphs.costs import find_crossings, variables_bytes, with_loss
from keras_multigpu.graphs.graph import Graph, LayerCall
from keras_multigpu.modes import ModelParallel
from keras_multigpu.reports.forms import new_figure, show_bytes

_MOST_BLOCKS, _MOST_COLUMNS = 23, 4
_WIDTH, _HEIGHT = 2.2, 0.4  # of a box
_GAP, _LANE = 0.15, 0.1  # between boxes; between the lines that pass beside them
_ROW = _HEIGHT + 0.26
_LEAST_WIDTH = 5.8  # for the title and the legend
_common = os.path.commonprefix  # what names begin with, letter by letter

Point = tuple[float, float]


class Line(NamedTuple):
    """A line from a box to another; it may cross to another device."""

    maker: int
    taker: int
    crosses: bool


def plot_placement(parallel: ModelParallel, rows: int = 1) -> Any:
    """Draws which device each layer is on, and what crosses between the devices.

    Each layer has a box in its device's column, with the bytes of its weights. Models with more
    than 22 layers are drawn by blocks of consecutive layers on a device. The inputs and the loss
    are on the first device. Of more than four devices some share a column.

    Red lines are tensors that cross. A red number in a box is the bytes that cross from there in a
    training step, with the gradients that come back. A tensor counts once for each device that it
    goes to.

    Args:
        parallel: a built model in mode `"model"` on TensorFlow.
        rows: the rows of a batch; the bytes are proportional to them.

    Returns:
        A `matplotlib.figure.Figure`, which needs no display.

    Raises:
        ValueError: if the model's layers are not placed on devices one by one, or `rows` is not a
            positive integer.
        ImportError: if matplotlib is not installed.

    Example:
        >>> from keras import Input, Sequential, layers
        >>> from keras_multigpu import make_parallel
        >>> model = Sequential([Input((8,)), layers.Dense(64), layers.Dense(2)])
        >>> parallel = make_parallel(model, 2, mode="model")
        >>> if parallel.stages is not None:  # there are none on JAX
        ...     figure = plot_placement(parallel, rows=32)
    """
    rows = positive_integer("rows", rows)
    stages = parallel.stages if isinstance(parallel, ModelParallel) else None
    if stages is None:
        cure = "In the other modes, and on JAX, every layer is on all devices."
        if isinstance(parallel, ModelParallel):
            cure = "It is not built: call it on a batch first."
            if parallel.built:
                cure = "Its large layers are spread: all devices have parts of each."
        raise ValueError(
            "`parallel` must be a built model in mode 'model' on TensorFlow, whose layers are on "
            f"different devices. Received: parallel={parallel!r}. {cure}"
        )
    graph, numbers = with_loss(stages.graph, stages.numbers)
    blocks = find_blocks(graph, numbers, _MOST_BLOCKS)
    lines, sent = _connect(graph, numbers, blocks, rows)
    used = {number: parallel.devices[number] for number in sorted(set(numbers))}
    places = {number: place % _MOST_COLUMNS for place, number in enumerate(used)}
    columns = [0, *(places[numbers[block[0]]] for block in blocks)]
    centers, paths, (width, height) = _arrange(columns, lines)
    count = len(parallel.devices)
    title = f"{parallel.name} on {count} device{'s' * (count > 1)}"
    axes = _new_axes(width, height, title, used, rows if sent else 0)
    for line, points in paths.items():
        _draw_line(axes, points, "red" if line.crosses else "grey")
    _draw_box(axes, centers[0], [0], "inputs", "", sent[0])
    counted: set[int] = set()
    for box, block in enumerate(blocks, 1):
        calls, own = graph.calls[block.start : block.stop], numbers[block.start : block.stop]
        details = "" if block is blocks[-1] else _details(calls, counted)
        _draw_box(axes, centers[box], own, _block_name(graph, block), details, sent[box])
    return axes.figure


def find_blocks(graph: Graph, numbers: Sequence[int], most: int) -> list[range]:
    """Divides the calls, in their order, into at most `most` blocks; the last, the loss, is alone.

    A graph of at most `most` calls has a block for each. Otherwise it is cut where the device
    changes, few tensors pass and names have little in common: between `block3a_add` and
    `block3b_conv`, or between two residual blocks. If that leaves too many, small neighbours are
    joined; those on different devices last.
    """
    count, costs = len(graph.calls), _cut_costs(graph)
    forced = {p for p in range(1, count) if numbers[p] != numbers[p - 1]} | {0, count - 1}
    cuts = list(range(count))
    for limit in sorted(set(costs)) if count > most else ():
        cuts = [place for place in range(count) if place in forced or costs[place] <= limit]
        if 2 * len(cuts) >= most:
            break
    blocks = [range(*ends) for ends in itertools.pairwise([*cuts, count])]

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
    common = map(_common, itertools.pairwise(names))
    shared = [len(re.findall("[/_]", one)) for one in common]
    return [passing[place] + one for place, one in enumerate([0, *shared])]


def _block_name(graph: Graph, block: range) -> str:
    """A call's own name; what a block's names, and no others, begin with; or the first and last."""
    names = ["/".join(call.path) for call in graph.calls]
    own = names[block.start : block.stop]
    ends = [name.rpartition("/")[2] for name in (own[0], own[-1])]
    if len(set(own)) == 1:
        return _shorten(ends[0], 34)
    common = re.match(".*[/_]", _common(own))
    if common and sum(name.startswith(common[0]) for name in names) == len(own):
        return _shorten(common[0][:-1], 34)
    return " … ".join(_shorten(name, 16) for name in ends)


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


def _connect(
    graph: Graph, numbers: Sequence[int], blocks: Sequence[range], rows: int
) -> tuple[list[Line], collections.Counter[int]]:
    """The lines between boxes, and the bytes that cross from each. Box 0 is the inputs."""
    boxes: dict[int | None, int] = {None: 0}
    boxes |= {place: box for box, block in enumerate(blocks, 1) for place in block}
    producers = graph.producers()
    lines: dict[Line, None] = {}
    for place, call in enumerate(graph.calls):
        for maker in map(producers.get, map(id, call.inputs)):
            crosses = numbers[place] != (0 if maker is None else numbers[maker])
            if boxes[maker] != boxes[place]:
                lines[Line(boxes[maker], boxes[place], crosses)] = None
    sent: collections.Counter[int] = collections.Counter()
    for crossing in find_crossings(graph, numbers):
        sent[boxes[crossing.maker]] += crossing.bytes(rows)
    return list(lines), sent


def _arrange(
    columns: Sequence[int], lines: Collection[Line]
) -> tuple[list[Point], dict[Line, list[Point]], Point]:
    """The boxes' centers, the points that each line goes through, and the size of the picture.

    Boxes have their columns. They come in an order in which each is after those that it takes from,
    and is in a row below these. A line that passes a row goes straight down there, in a lane beside
    the column that it comes from, so that no line crosses a box.
    """
    rows: list[int] = []
    for box, column in enumerate(columns):
        row = max((rows[line.maker] + 1 for line in lines if line.taker == box), default=0)
        while (row, column) in zip(rows, columns):
            row += 1
        rows.append(row)
    passed = {line: range(rows[line.maker] + 1, rows[line.taker]) for line in lines}
    # Lines from one box share a lane.
    lanes = dict.fromkeys((line.maker, line.crosses) for line in lines if passed[line])
    beside, middles, right = {}, [], 0.0
    for column in range(max(columns) + 1):
        middles.append(right + (_WIDTH + _GAP) / 2)
        right += _WIDTH + _GAP
        for lane in (one for one in lanes if columns[one[0]] == column):
            beside[lane] = right + _LANE / 2
            right += _LANE
    heights = [row * _ROW + _HEIGHT / 2 for row in range(max(rows) + 1)]
    centers = [(middles[column], heights[row]) for row, column in zip(rows, columns)]
    paths = {}
    for line, between in passed.items():
        way = [(beside[line.maker, line.crosses], heights[row]) for row in between]
        paths[line] = [centers[line.maker], *way, centers[line.taker]]
    return centers, paths, (right, heights[-1] + _HEIGHT / 2)


def _details(calls: Sequence[LayerCall], counted: set[int]) -> str:
    """How many layers, and the bytes of their weights; those in `counted` are not counted again."""
    layers = {id(call.layer): call.layer for call in calls}
    found = [one for layer in layers.values() for one in getattr(layer, "weights", ())]
    fresh = [one for one in found if id(one) not in counted]
    counted |= set(map(id, fresh))
    size = variables_bytes(fresh)
    weights = f"{show_bytes(size)} of weights" if size else "no weights"
    return weights if len(layers) == 1 else f"{len(layers)} layers, {weights}"


def _new_axes(width: float, height: float, title: str, used: Mapping[int, str], rows: int) -> Any:
    """Axes in inches, with the title, the devices' colours, and what red is (for `rows`)."""
    header = 0.5 + 0.17 * (len(used) // 5 + 1)
    margin = max(0.05, (_LEAST_WIDTH - width) / 2)
    figure = new_figure(width + 2 * margin, height + header + 0.05)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-margin, width + margin), ylim=(height + 0.05, -header))
    axes.axis("off")
    axes.text(width / 2, 0.25 - header, title, fontsize=11, ha="center", va="center")
    handles = [axes.scatter([], [], marker="s", color=f"C{one % 10}", alpha=0.35) for one in used]
    names = list(used.values())
    if rows:
        handles += axes.plot([], [], color="red", lw=0.9)
        names.append(f"bytes that cross in a step of {rows} row{'s' * (rows > 1)}")
    top = 1 - 0.38 / (height + header + 0.05)
    style: dict[str, Any] = {"ncols": 5, "fontsize": 7, "frameon": False}
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, top), **style)
    return axes


def _draw_line(axes: Any, points: Sequence[Point], color: str) -> None:
    """An arrow from below a box to above another, straight down in the rows between them."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    x, y = points[0]
    corners, codes = [(x, y + _HEIGHT / 2)], [Path.MOVETO]
    for x, y in points[1:]:
        above, (start, bottom) = y - _HEIGHT / 2, corners[-1]
        middle = (bottom + above) / 2
        corners += [(start, middle), (x, middle), (x, above), (x, y + _HEIGHT / 2)]
        codes += [*[Path.CURVE4] * 3, Path.LINETO]
    path = Path(corners[:-1], codes[:-1])  # it ends above the last box
    arrow = FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=7, color=color, lw=0.9)
    axes.add_patch(arrow)


def _draw_box(
    axes: Any, center: Point, numbers: Sequence[int], name: str, details: str, sent: int
) -> None:
    """A box with a stripe for each device in it, and the bytes that cross from it in red."""
    x, y = center
    start = x - _WIDTH / 2
    for number, count in sorted(collections.Counter(numbers).items()):
        part = _WIDTH * count / len(numbers)
        axes.barh(y, part, _HEIGHT, left=start, align="center", color=f"C{number % 10}", alpha=0.35)
        start += part
    raised = 0.08 if details or sent else 0
    size = min(8, 235 / len(name))
    axes.text(x, y - raised, name, fontsize=size, ha="center", va="center")
    edge = _WIDTH / 2 - 0.06 if details and sent else 0  # both side by side, or one in the middle
    style: dict[str, Any] = {"va": "center", "fontsize": 6.5}
    if details:
        axes.text(x - edge, y + 0.09, details, ha="left" if edge else "center", **style)
    if sent:
        style |= {"ha": "right" if edge else "center", "color": "red"}
        axes.text(x + edge, y + 0.09, f"sends {show_bytes(sent)}", **style)
