"""A plot of mode `"model"`: which device each layer is on, and what crosses."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.arguments import positive_integer
from keras_multigpu.graphs.costs import find_crossings, variables_bytes, with_loss
from keras_multigpu.graphs.graph import Graph, LayerCall
from keras_multigpu.modes import ModelParallel
from keras_multigpu.reports import layout
from keras_multigpu.reports.forms import new_figure, show_bytes
from keras_multigpu.reports.layout import HEIGHT, WIDTH, Line, Point

_MOST_BLOCKS, _MOST_COLUMNS = 23, 4
_LEAST_WIDTH = 5.8  # inches, for the title and the legend


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
    blocks = layout.find_blocks(graph, numbers, _MOST_BLOCKS)
    lines, sent = _connect(graph, numbers, blocks, rows)
    used = {number: parallel.devices[number] for number in sorted(set(numbers))}
    places = {number: place % _MOST_COLUMNS for place, number in enumerate(used)}
    columns = [0, *(places[numbers[block[0]]] for block in blocks)]
    centers, paths, (width, height) = layout.arrange(columns, lines)
    count = len(parallel.devices)
    title = f"{parallel.name} on {count} device{'s' * (count > 1)}"
    axes = _new_axes(width, height, title, used, rows if sent else 0)
    for line, points in paths.items():
        _draw_line(axes, points, "red" if line[2] else "grey")
    _draw_box(axes, centers[0], [0], "inputs", "", sent.get(0, 0))
    counted: set[int] = set()
    for box, (block, center) in enumerate(zip(blocks, centers[1:]), 1):
        is_loss = block.stop == len(graph.calls)
        details = "" if is_loss else _details([graph.calls[place] for place in block], counted)
        own, name = [numbers[place] for place in block], layout.block_name(graph, block)
        _draw_box(axes, center, own, name, details, sent.get(box, 0))
    return axes.figure


def _connect(
    graph: Graph, numbers: Sequence[int], blocks: Sequence[range], rows: int
) -> tuple[dict[Line, None], dict[int, int]]:
    """The lines between boxes, and the bytes that cross from each. Box 0 is the inputs."""
    boxes = {place: box for box, block in enumerate(blocks, 1) for place in block}
    producers = graph.producers()
    lines: dict[Line, None] = {}
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            source, number = (0, 0) if maker is None else (boxes[maker], numbers[maker])
            if source != boxes[place]:
                lines[source, boxes[place], number != numbers[place]] = None
    sent: dict[int, int] = collections.defaultdict(int)
    for crossing in find_crossings(graph, numbers):
        sent[0 if crossing.maker is None else boxes[crossing.maker]] += crossing.bytes(rows)
    return lines, sent


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
    corners, codes = [(x, y + HEIGHT / 2)], [Path.MOVETO]
    for x, y in points[1:]:
        above, (start, bottom) = y - HEIGHT / 2, corners[-1]
        middle = (bottom + above) / 2
        corners += [(start, middle), (x, middle), (x, above), (x, y + HEIGHT / 2)]
        codes += [*[Path.CURVE4] * 3, Path.LINETO]
    path = Path(corners[:-1], codes[:-1])  # it ends above the last box
    arrow = FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=7, color=color, lw=0.9)
    axes.add_patch(arrow)


def _draw_box(
    axes: Any, center: Point, numbers: Sequence[int], name: str, details: str, sent: int
) -> None:
    """A box with a stripe for each device in it, and the bytes that cross from it in red."""
    x, y = center
    start = x - WIDTH / 2
    for number, count in sorted(collections.Counter(numbers).items()):
        part = WIDTH * count / len(numbers)
        axes.barh(y, part, HEIGHT, left=start, align="center", color=f"C{number % 10}", alpha=0.35)
        start += part
    style: dict[str, Any] = {"ha": "center", "va": "center"}
    raised = 0.08 if details or sent else 0
    axes.text(x, y - raised, name, fontsize=min(8, 235 / len(name)), **style)
    lower = [(details, "black"), (f"sends {show_bytes(sent)}" if sent else "", "red")]
    texts = [one for one in lower if one[0]]
    sides = ("left", "right") if len(texts) == 2 else ("center",)
    shifts = {"left": 0.06 - WIDTH / 2, "center": 0.0, "right": WIDTH / 2 - 0.06}
    for (text, color), side in zip(texts, sides):
        style = {"ha": side, "va": "center", "color": color}
        axes.text(x + shifts[side], y + 0.09, text, fontsize=6.5, **style)
