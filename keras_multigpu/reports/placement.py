"""How mode `"model"` divides a model: what crosses, what each device keeps, and a plot of it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import positive_integer
from keras_multigpu.graphs.costs import row_bytes, variables_bytes
from keras_multigpu.graphs.crossings import find_crossings, find_share
from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.graphs.placement import check_placement, choose_placement, place_by_names
from keras_multigpu.modes import ModelParallel
from keras_multigpu.reports.forms import new_figure, show_bytes
from keras_multigpu.reports.prediction import Cut, Sizes

_COLUMN, _ROW = 2.4, 0.55  # inches for a layer


def find_cut(
    model: keras.Model,
    devices: int,
    batch_size: int,
    sizes: Sizes,
    placement: Mapping[str, int] | None = None,
) -> Cut:
    """What would cross if a model were divided, and the busiest device's work and memory.

    `placement` is as in `make_parallel`.
    """
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
    chosen = choose_placement(graph, devices)
    numbers = place_by_names(graph, placement) if placement else chosen
    between = [one for one in find_crossings(*with_loss(graph, numbers)) if one.maker is not None]
    kept: dict[int, int] = collections.defaultdict(int)
    counted: set[int] = set()
    # Each weight has a gradient and optimizer slots beside it.
    factor = 1 + (sizes.gradients + sizes.slots) / max(sizes.weights, 1)
    for call, number in zip(graph.calls, numbers):
        fresh = [variable for variable in call.variables if id(variable) not in counted]
        counted |= set(map(id, fresh))
        kept[number] += round(factor * variables_bytes(fresh))
        kept[number] += batch_size * sum(map(row_bytes, call.outputs))
    return Cut(
        size=batch_size * sum(one.row_bytes for one in between),
        copies=len(between),
        share=find_share(graph, numbers),
        memory=max(kept.values(), default=0),
    )


def with_loss(graph: Graph, numbers: Sequence[int]) -> tuple[Graph, list[int]]:
    """A graph and its placement with the loss as the last call, which runs on device 0.

    Outputs of other devices cross to it, and their gradients cross back.
    """
    layer, count = keras.layers.Identity(name="loss"), len(graph.calls)
    loss = LayerCall(layer, ("loss",), tuple(graph.outputs), (), count)
    return Graph(graph.inputs, graph.outputs, (*graph.calls, loss)), [*numbers, 0]


def plot_placement(parallel: ModelParallel, rows: int = 1) -> Any:
    """Draws which device each layer is on, and what crosses between the devices.

    Layers go from top to bottom in the order of their calls; the loss, on the first device, is
    below them. A red line is a tensor that crosses, labelled with its bytes in a training step,
    its gradient included.

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
        raise ValueError(
            "`parallel` must be a built model in mode 'model' on TensorFlow, whose layers are on "
            f"different devices. Received: parallel={parallel!r}. In the other modes, and on "
            "JAX, every layer is on all devices."
        )
    graph, numbers = with_loss(stages.graph, stages.numbers)
    positions = _layout(graph)
    width, height = (int(max(column)) + 1 for column in zip(*positions))
    figure = new_figure(max(4.0, _COLUMN * width), max(2.0, _ROW * (height + 2)))
    axes = figure.subplots()
    for call, number, position in zip(graph.calls, numbers, positions):
        box = {"boxstyle": "round", "facecolor": f"C{number % 10}", "alpha": 0.35}
        axes.text(*position, call.path[-1], ha="center", va="center", fontsize=7, bbox=box)
    for start, end, text in _lines(graph, numbers, positions, rows):
        style = {"arrowstyle": "->", "color": "red" if text else "grey", "lw": 0.8}
        axes.annotate("", end, start, arrowprops=style | {"shrinkA": 8, "shrinkB": 8}, zorder=0)
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        if text:
            axes.text(*middle, text, color="red", fontsize=7, ha="left", va="center")
    axes.set(xlim=(-0.6, width - 0.4), ylim=(height - 0.3, -1.0))
    axes.set_title(f"{parallel.name} on {len(parallel.devices)} devices", fontsize=10)
    axes.axis("off")
    used = sorted(set(numbers))
    handles = [axes.scatter([], [], marker="s", color=f"C{one % 10}", alpha=0.35) for one in used]
    axes.legend(handles, [parallel.devices[one] for one in used], loc="upper right", fontsize=7)
    return figure


def _layout(graph: Graph) -> list[tuple[float, int]]:
    """A column and a level for each call: below the calls that it takes tensors from."""
    producers = graph.producers()
    levels: list[int] = []
    columns: list[float] = []
    taken: dict[int, set[float]] = collections.defaultdict(set)
    for call in graph.calls:
        before = [producers[id(tensor)] for tensor in call.inputs if id(tensor) in producers]
        level = max((levels[place] + 1 for place in before), default=0)
        wanted = sum(columns[place] for place in before) / len(before) if before else 0.0
        column = float(round(wanted))
        while column in taken[level]:
            column += 1
        taken[level].add(column)
        levels.append(level)
        columns.append(column)
    return list(zip(columns, levels))


def _lines(
    graph: Graph, numbers: Sequence[int], positions: Sequence[tuple[float, int]], rows: int
) -> Iterator[tuple[tuple[float, float], tuple[float, float], str]]:
    """The start, the end and the label of each line; tensors that stay have no label."""
    producers = graph.producers()
    for taker, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            if maker is not None and numbers[maker] == numbers[taker]:
                yield positions[maker], positions[taker], ""
    for crossing in find_crossings(graph, numbers):
        text = f" {show_bytes(crossing.bytes(rows))}"  # the space keeps it off the line
        for taker in crossing.takers:
            column, level = positions[taker]
            # Inputs come from the first device and have no box: their lines start above the taker.
            start = (column, level - 0.9) if crossing.maker is None else positions[crossing.maker]
            yield start, positions[taker], text
