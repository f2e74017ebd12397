"""The bytes of a model, and what mode `"model"` makes of them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.graphs.costs import (
    find_crossings,
    find_share,
    row_bytes,
    variables_bytes,
    with_loss,
)
from keras_multigpu.graphs.graph import Graph, is_graph, read_graph
from keras_multigpu.graphs.placement import check_placement, choose_placement, place_by_names
from keras_multigpu.reports.workload import Cut, Sizes


def find_sizes(model: keras.Model, outputs: Any, inputs: Any = ()) -> Sizes:
    """The bytes of a built model, given its outputs and inputs for one row; no memory of a step."""
    graph = read_graph(model) if is_graph(model) else Graph((), (), ())
    tables, looked_up = _find_tables(graph)
    return Sizes(
        weights=variables_bytes(model.variables),
        gradients=variables_bytes(model.trainable_variables),
        tensors=len(model.variables),
        outputs=sum(map(row_bytes, keras.tree.flatten(outputs))),
        inputs=sum(map(row_bytes, keras.tree.flatten(inputs))),
        tables=tables,
        looked_up=looked_up,
    )


def _find_tables(graph: Graph) -> tuple[int, int]:
    """The bytes of trained tables of which a large batch names few rows, and of a row's."""
    named: collections.Counter[Any] = collections.Counter()
    for call in graph.calls:
        if isinstance(call.layer, keras.layers.Embedding) and call.layer.trainable:
            named[call.layer] += sum(map(row_bytes, call.outputs))
    sizes = {one: variables_bytes(one.trainable_variables) for one in named}
    large = [one for one, size in sizes.items() if size > engines.LARGE_BATCH * named[one]]
    return sum(sizes[one] for one in large), sum(named[one] for one in large)


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


def _find_fullest(
    graph: Graph, numbers: Sequence[int], batch_size: int, sizes: Sizes
) -> int | None:
    """The bytes of the device that keeps most: its layers' variables and outputs; if counted.

    Each weight has a gradient and optimizer slots beside it.
    """
    if sizes.working is None:
        return None
    outputs = sum(row_bytes(one) for call in graph.calls for one in call.outputs)
    kept_rows = sizes.activations - sizes.passing
    factor = 1 + (sizes.working + sizes.slots) / max(sizes.weights, 1)
    kept: dict[int, int] = collections.defaultdict(int)
    counted: set[int] = set()
    for call, number in zip(graph.calls, numbers):
        fresh = [variable for variable in call.variables if id(variable) not in counted]
        counted |= set(map(id, fresh))
        made = batch_size * sum(map(row_bytes, call.outputs))
        kept[number] += round(factor * variables_bytes(fresh))
        kept[number] += round(kept_rows / max(outputs, 1) * made)
    return max(kept.values(), default=0) + batch_size * sizes.passing
