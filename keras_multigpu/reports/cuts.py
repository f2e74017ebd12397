"""How a model would be spread in model mode: found from its graph, without spreading it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import keras

from keras_multigpu import engines
from keras_multigpu.graphs.costs import row_bytes, variables_bytes
from keras_multigpu.graphs.crossings import find_crossings, find_share
from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.graphs.placement import (
    check_placement,
    choose_placement,
    place_by_names,
)
from keras_multigpu.reports.workload import Cut, Sizes


def find_cut(
    model: keras.Model,
    devices: int,
    batch_size: int,
    sizes: Sizes,
    placement: Mapping[str, int] | None = None,
) -> Cut:
    """What crosses, and who works and keeps how much, if a model is spread over devices.

    Args:
        model: a built Sequential or functional model.
        devices: how many devices there are.
        batch_size: the rows of a batch.
        sizes: the model's.
        placement: as in `make_parallel`; `None` for the one that is chosen by default.

    Raises:
        ValueError: if the model is no graph, the placement does not fit, or the backend spreads
            layers instead of placing them.

    Example:
        >>> inputs = keras.Input((4,))
        >>> ends = [keras.layers.Dense(8)(inputs) for _ in range(2)]
        >>> model = keras.Model(inputs, keras.layers.Add()(ends))
        >>> from keras_multigpu.reports.sizes import find_sizes
        >>> sizes = find_sizes(model, model.outputs)
        >>> if keras.backend.backend() == "tensorflow":
        ...     cut = find_cut(model, 2, 10, sizes, {"dense.*": 1})
        ...     assert cut.size == 2 * 10 * 8 * 4  # of two layers, 10 rows of 8 numbers each
    """
    engine = engines.current()
    if engine.partitions:
        raise ValueError(
            f"On {engine.title} model mode spreads each layer over all devices, and what crosses "
            "is the compiler's choice. Received: modes with 'model', and no cut for "
            f"{devices} devices. Count with `reports.transfers`, and give "
            f"`cuts={{{devices}: Cut(size, copies, share)}}`."
        )
    if not is_graph(model):
        raise ValueError(
            "Model mode places the layers of a Sequential or functional model without a `call` of "
            f"its own. Received: model={model!r}. Leave 'model' out of `modes`."
        )
    check_placement(placement, devices)
    graph = read_graph(model)
    chosen = choose_placement(graph, devices)
    numbers = place_by_names(graph, placement) if placement else chosen
    between = [one for one in find_crossings(*with_loss(graph, numbers)) if one.maker is not None]
    kept: dict[int, int] = collections.defaultdict(int)
    counted: set[int] = set()
    # A weight has a gradient and the optimizer's state beside it.
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
    """A graph with the loss as its last call, on the first device, and the device of every call.

    Outputs that other devices make cross to it, and their gradients come back.

    Args:
        graph: a model's graph.
        numbers: the device of every call.
    """
    layer, count = keras.layers.Identity(name="loss"), len(graph.calls)
    loss = LayerCall(layer, ("loss",), tuple(graph.outputs), (), count)
    return Graph(graph.inputs, graph.outputs, (*graph.calls, loss)), [*numbers, 0]
