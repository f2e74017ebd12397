"""How mode `"model"` divides a model: what crosses, what each device keeps, and a plot of it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import positive_integer
from keras_multigpu.graphs.costs import (
    find_crossings,
    find_share,
    row_bytes,
    variables_bytes,
    with_loss,
)
from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.graphs.placement import check_placement, choose_placement, place_by_names
from keras_multigpu.modes import ModelParallel
from keras_multigpu.reports.forms import new_figure, show_bytes
from keras_multigpu.reports.layout import (
    HEIGHT,
    WIDTH,
    Net,
    Point,
    block_name,
    find_blocks,
    place_boxes,
    route,
)
from keras_multigpu.reports.prediction import Cut, Sizes

_MOST_BLOCKS = 36  # in a plot
_LEAST_WIDTH = 5.8  # inches, for the title and the legend


def find_cut(
    model: keras.Model,
    devices: int,
    batch_size: int,
    sizes: Sizes,
    placement: Mapping[str, int] | None = None,
) -> Cut:
    """What would cross if a model were divided, and the busiest device's work and memory."""
    if engines.current().partitions:
        raise ValueError(
            f"On {engines.current().title} mode 'model' spreads each layer over all devices, and "
            "the compiler decides what crosses. Received: modes with 'model', and no cut for "
            f"{devices} devices. Count with `reports.transfers`, and give "
            f"`cuts={{{devices}: Cut(size, copies, share)}}`."
        )
    if not is_graph(model):
        raise ValueError(
            "Mode 'model' places the layers of a Sequential or functional model without a custom "
            f"`call`. Received: model={model!r}. Leave 'model' out of `modes`."
        )
    check_placement(placement, devices)
    graph = read_graph(model)
    numbers = place_by_names(graph, placement) if placement else choose_placement(graph, devices)
    between = [one for one in find_crossings(*with_loss(graph, numbers)) if one.maker is not None]
    return Cut(
        size=batch_size * sum(one.row_bytes for one in between),
        copies=len(between),
        share=find_share(graph, numbers),
        memory=_find_fullest(graph, numbers, batch_size, sizes),
    )


def _find_fullest(graph: Graph, numbers: Sequence[int], batch_size: int, sizes: Sizes) -> int:
    """The bytes of the device that keeps most: its layers' variables and outputs.

    Each weight has a gradient and optimizer slots beside it.
    """
    outputs = sum(row_bytes(one) for call in graph.calls for one in call.outputs)
    is_counted = sizes.working is not None and sizes.activations is not None
    kept_rows = (sizes.activations or 0) - sizes.passing if is_counted else outputs
    factor = 1 + (sizes.work + sizes.slots) / max(sizes.weights, 1)
    kept: dict[int, int] = collections.defaultdict(int)
    counted: set[int] = set()
    for call, number in zip(graph.calls, numbers):
        fresh = [variable for variable in call.variables if id(variable) not in counted]
        counted |= set(map(id, fresh))
        made = batch_size * sum(map(row_bytes, call.outputs))
        kept[number] += round(factor * variables_bytes(fresh))
        kept[number] += round(kept_rows / max(outputs, 1) * made)
    return max(kept.values(), default=0) + batch_size * sizes.passing


def plot_placement(parallel: ModelParallel, rows: int = 1) -> Any:
    """Draws which device each layer is on, and what crosses between the devices.

    Each layer has a box, with the bytes of its weights. Models with more than 35 layers are drawn
    by blocks of consecutive layers on a device. The inputs and the loss are on the first device.

    Red lines are tensors that cross. A red number below a box is the bytes that cross from there in
    a training step, with the gradients that come back. A tensor counts once for each device that
    it goes to.

    Args:
        parallel: a built model in mode `"model"` on TensorFlow.
        rows: the rows of a batch; the bytes are proportional to them.

    Returns:
        A `matplotlib.figure.Figure`, which needs no display, of at most 12 x 16 inches.

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
        raise ValueError(
            "`parallel` must be a built model in mode 'model' on TensorFlow, whose layers are on "
            f"different devices. Received: parallel={parallel!r}. In the other modes, and on "
            "JAX, every layer is on all devices."
        )
    graph, numbers = with_loss(stages.graph, stages.numbers)
    blocks = find_blocks(graph, numbers, _MOST_BLOCKS)
    makers, nets, sent = _connect(graph, numbers, blocks, rows)
    centers, paths, (width, height) = route(place_boxes(makers), nets)
    used = {number: parallel.devices[number] for number in sorted(set(numbers))}
    header = 0.5 + 0.17 * (len(used) // 5 + 1)
    margin = max(0.0, (_LEAST_WIDTH - width) / 2)
    figure = new_figure(width + 2 * margin, height + header)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))  # data coordinates are inches
    axes.set(xlim=(-margin, width + margin), ylim=(height, -header))
    axes.axis("off")
    _draw_lines(axes, nets, paths, centers, sent)
    _draw_box(axes, centers[0], [0], "inputs", "")
    counted: set[int] = set()
    for block, center in zip(blocks, centers[1:]):
        is_loss = block.stop == len(graph.calls)
        details = "" if is_loss else _details([graph.calls[place] for place in block], counted)
        own = [numbers[place] for place in block]
        _draw_box(axes, center, own, block_name(graph, block), details)
    count = len(parallel.devices)
    title = f"{parallel.name} on {count} device{'s' * (count > 1)}"
    axes.text(width / 2, 0.25 - header, title, fontsize=11, ha="center", va="center")
    _draw_legend(axes, used, rows if sent else 0, 1 - 0.38 / (height + header))
    return figure


def _draw_lines(
    axes: Any,
    nets: Sequence[Net],
    paths: Sequence[Sequence[Sequence[Point]]],
    centers: Sequence[Point],
    sent: Mapping[int, int],
) -> None:
    """The lines, and the bytes that cross from boxes."""
    starts = {box: center[0] for box, center in enumerate(centers)}
    for net, lines in zip(nets, paths):
        style = {"color": "red" if net.crosses else "grey", "lw": 0.9, "marker": "v", "ms": 4}
        for line in lines:
            axes.plot(*zip(*line), **style, markevery=[-1])
        if net.crosses:
            starts[net.source] = lines[0][0][0]
    for box, size in sent.items():
        place = (starts[box], centers[box][1] + HEIGHT / 2 + 0.1)
        axes.text(*place, f" {show_bytes(size)}", color="red", fontsize=7, va="center")


def _draw_legend(axes: Any, used: Mapping[int, str], rows: int, top: float) -> None:
    """The devices' colours, and what red lines are."""
    handles = [axes.scatter([], [], marker="s", color=f"C{one % 10}", alpha=0.35) for one in used]
    names = list(used.values())
    if rows:
        handles += axes.plot([], [], color="red", lw=0.9)
        names.append(f"bytes that cross in a step of {rows} row{'s' * (rows > 1)}")
    style: dict[str, Any] = {"ncols": 5, "fontsize": 7, "frameon": False}
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, top), **style)


def _connect(
    graph: Graph, numbers: Sequence[int], blocks: Sequence[range], rows: int
) -> tuple[list[set[int]], list[Net], dict[int, int]]:
    """For each box those that it takes from; the lines; the bytes that cross from boxes.

    Box 0 is the inputs.
    """
    boxes = {place: box for box, block in enumerate(blocks, 1) for place in block}
    producers = graph.producers()
    makers: list[set[int]] = [set() for _ in range(len(blocks) + 1)]
    targets: dict[tuple[int, bool], set[int]] = collections.defaultdict(set)
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            source, number = (0, 0) if maker is None else (boxes[maker], numbers[maker])
            if source != boxes[place]:
                makers[boxes[place]].add(source)
                targets[source, number != numbers[place]].add(boxes[place])
    sent: dict[int, int] = collections.defaultdict(int)
    for crossing in find_crossings(graph, numbers):
        sent[0 if crossing.maker is None else boxes[crossing.maker]] += crossing.bytes(rows)
    nets = [Net(box, tuple(sorted(takers)), red) for (box, red), takers in targets.items()]
    return makers, nets, sent


def _details(calls: Sequence[LayerCall], counted: set[int]) -> str:
    """How many layers, and the bytes of their weights; those in `counted` are not counted again."""
    layers = {id(call.layer): call.layer for call in calls}
    found = [one for layer in layers.values() for one in getattr(layer, "weights", ())]
    fresh = [one for one in found if id(one) not in counted]
    counted |= set(map(id, fresh))
    size = variables_bytes(fresh)
    weights = f"{show_bytes(size)} of weights" if size else "no weights"
    return weights if len(layers) == 1 else f"{len(layers)} layers, {weights}"


def _draw_box(axes: Any, center: Point, numbers: Sequence[int], name: str, details: str) -> None:
    """A box with a stripe for each device in it."""
    x, y = center
    start = x - WIDTH / 2
    for number, count in sorted(collections.Counter(numbers).items()):
        part = WIDTH * count / len(numbers)
        axes.barh(y, part, HEIGHT, left=start, align="center", color=f"C{number % 10}", alpha=0.35)
        start += part
    style = {"ha": "center", "va": "center"}
    axes.text(x, y - 0.07 if details else y, name, fontsize=min(8, 235 / len(name)), **style)
    if details:
        axes.text(x, y + 0.1, details, fontsize=6.5, **style)
