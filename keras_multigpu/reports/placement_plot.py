"""A model's graph with its devices as colours, and the bytes that cross between them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from keras_multigpu.graphs.crossings import find_crossings
from keras_multigpu.graphs.graph import Graph
from keras_multigpu.modes import ModelParallel
from keras_multigpu.reports.checks import check_count
from keras_multigpu.reports.cuts import with_loss
from keras_multigpu.reports.drawing import new_figure
from keras_multigpu.reports.units import show_bytes

_COLUMN, _ROW = 2.4, 0.55  # inches that a layer takes


def plot_placement(parallel: ModelParallel, rows: int = 1) -> Any:
    """Draws which device each layer is on, and what crosses between the devices.

    Layers go from top to bottom in the order of their calls, and the loss, which is computed on the
    first device, is below them. A red line is a tensor that crosses, with its bytes in a training
    step: there, and its gradient back.

    Args:
        parallel: a model in mode `"model"`, on TensorFlow, that is built.
        rows: the rows of a batch, by which bytes are multiplied.

    Returns:
        A `matplotlib.figure.Figure`, which needs no display.

    Raises:
        ValueError: if the model's layers are not placed on devices one by one, or `rows` is no
            number of rows.
        ImportError: if matplotlib is not installed.

    Example:
        >>> from keras import Input, Sequential, layers
        >>> from keras_multigpu import make_parallel
        >>> model = Sequential([Input((8,)), layers.Dense(64), layers.Dense(2)])
        >>> parallel = make_parallel(model, 2, mode="model")
        >>> if parallel.stages is not None:  # there are none on JAX
        ...     figure = plot_placement(parallel, rows=32)
    """
    check_count("rows", rows)
    stages = parallel.stages if isinstance(parallel, ModelParallel) else None
    if stages is None:
        raise ValueError(
            "`parallel` must be a built model in mode 'model' on TensorFlow, whose layers are on "
            f"different devices. Received: parallel={parallel!r}. In the other modes, and on "
            "JAX, every layer is on all devices."
        )
    graph, numbers = with_loss(stages.graph, stages.numbers)
    places = _places(graph)
    width = max(place for place, _ in places) + 1
    height = max(level for _, level in places) + 1
    figure = new_figure(max(4.0, _COLUMN * width), max(2.0, _ROW * (height + 2)))
    axes = figure.subplots()
    _draw_layers(axes, graph, numbers, places)
    _draw_lines(axes, graph, numbers, places, rows)
    axes.set(xlim=(-0.6, width - 0.4), ylim=(height - 0.3, -1.0))
    axes.set_title(f"{parallel.name} on {len(parallel.devices)} devices", fontsize=10)
    axes.axis("off")
    used = sorted(set(numbers))
    handles = [axes.scatter([], [], marker="s", color=_color(one), alpha=0.35) for one in used]
    axes.legend(handles, [parallel.devices[one] for one in used], loc="upper right", fontsize=7)
    return figure


def _places(graph: Graph) -> list[tuple[float, int]]:
    """A column and a level for each call: below those that it takes tensors from."""
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


def _draw_layers(
    axes: Any, graph: Graph, numbers: Sequence[int], places: Sequence[tuple[float, int]]
) -> None:
    for call, number, place in zip(graph.calls, numbers, places):
        box = {"boxstyle": "round", "facecolor": _color(number), "alpha": 0.35}
        axes.text(*place, call.path[-1], ha="center", va="center", fontsize=7, bbox=box)


def _color(number: int) -> str:
    return f"C{number % 10}"


def _draw_lines(
    axes: Any,
    graph: Graph,
    numbers: Sequence[int],
    places: Sequence[tuple[float, int]],
    rows: int,
) -> None:
    producers = graph.producers()
    for taker, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            if maker is not None and numbers[maker] == numbers[taker]:
                _draw_line(axes, places[maker], places[taker], "grey")
    for crossing in find_crossings(graph, numbers):
        for taker in crossing.takers:
            column, level = places[taker]
            # Inputs come from the first device: they are drawn as coming from above.
            start = (column, level - 0.9) if crossing.maker is None else places[crossing.maker]
            _draw_line(axes, start, places[taker], "red")
            middle = ((start[0] + column) / 2, (start[1] + level) / 2)
            text = f" {show_bytes(crossing.bytes(rows))}"  # beside the line, not on it
            axes.text(*middle, text, color="red", fontsize=7, ha="left", va="center")


def _draw_line(axes: Any, start: Sequence[float], end: Sequence[float], color: str) -> None:
    style = {"arrowstyle": "->", "color": color, "lw": 0.8, "shrinkA": 8, "shrinkB": 8}
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=0)
