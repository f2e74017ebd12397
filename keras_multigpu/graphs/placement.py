"""Places each layer of a graph on a device, as the user says or by estimated costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import keras

from keras_multigpu.arguments import as_integer
from keras_multigpu.graphs import costs
from keras_multigpu.graphs.graph import Graph
from keras_multigpu.graphs.partition import cut, schedule

# Branches go to several devices only if that saves a tenth of the estimated time.
_LEAST_GAIN = 0.9


def check_placement(placement: object, count: int) -> None:
    """Raises a `ValueError` unless it is `None` or a dict from names to device numbers."""
    expected = (
        "`placement` must be None, or a dict from names of layers, or regular expressions, to "
        f"device numbers from 0 to {count - 1}."
    )
    if placement is None:
        return
    if not isinstance(placement, Mapping) or not placement:
        raise ValueError(f"{expected} Received: placement={placement!r}.")
    for name, number in placement.items():
        device = as_integer(number)
        if not isinstance(name, str) or device is None or not 0 <= device < count:
            raise ValueError(
                f"{expected} Received: {name!r}: {number!r}, with {count} devices. Use a number "
                "in that range, or make the model parallel on more devices."
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"{expected} Received: {name!r}, which is no regular expression: {error}. "
                "Escape what is to be taken literally: `re.escape(name)`."
            ) from error


def place_by_names(graph: Graph, placement: Mapping[str, int]) -> list[int]:
    """The device of every call, by layer names or by regular expressions for whole names.

    A name is a layer's, or the name of a model around it, or both joined by a slash. Layers that
    nothing matches go to device 0; operations go beside the calls that make or use their tensors.

    Raises:
        ValueError: if an entry matches no layer, or a layer is matched twice.
    """
    numbers: dict[int, int] = {}
    unused = set(placement)
    for place, call in enumerate(graph.calls):
        matched = [key for key in placement if _matches(key, call.path)]
        if len(matched) > 1:
            raise ValueError(
                "Every layer must be matched by one entry of `placement` at most. Received: "
                f"layer {'/'.join(call.path)!r}, which {' and '.join(map(repr, matched))} match. "
                "Make them narrower; they are matched against whole names."
            )
        unused -= set(matched)
        if matched:
            numbers[place] = placement[matched[0]]
    if unused:
        names = ", ".join(dict.fromkeys("/".join(call.path) for call in graph.calls))
        raise ValueError(
            f"Every entry of `placement` must match a layer. Received: "
            f"{', '.join(map(repr, sorted(unused)))}, which match none. The layers are: {names}."
        )
    for place, call in enumerate(graph.calls):
        if place not in numbers and isinstance(call.layer, keras.Layer):
            numbers[place] = 0
    return _with_operations(graph, numbers)


def choose_placement(graph: Graph, count: int) -> list[int]:
    """Chooses the device of every call.

    Branches go to different devices if the estimate saves time: list scheduling of the graph's
    chains by the remaining path (HEFT: Topcuoglu, Hariri and Wu, 2002). Otherwise the calls are
    cut into consecutive stages of similar work and weights, where the fewest bytes cross: chain
    partitioning by dynamic programming (as in Pinar and Aykanat, 2004). All calls of a layer go to
    one device.
    """
    if count == 1 or not graph.calls:
        return [0] * len(graph.calls)
    scheduled, span = schedule(graph, count)
    alone = sum(costs.seconds(call) for call in graph.calls)
    numbers = scheduled if span <= _LEAST_GAIN * alone else cut(graph, count)
    first: dict[int, int] = {}
    return [first.setdefault(id(c.layer), n) for c, n in zip(graph.calls, numbers)]


def _matches(key: str, path: Sequence[str]) -> bool:
    names = {*path, *("/".join(path[:end]) for end in range(1, len(path) + 1))}
    return key in names or any(re.fullmatch(key, name) for name in names)


def _with_operations(graph: Graph, numbers: dict[int, int]) -> list[int]:
    """Places the remaining calls beside those that make or take their tensors."""
    producers = graph.producers()
    consumers = {id(t): n for n, call in reversed([*enumerate(graph.calls)]) for t in call.inputs}
    for place, call in enumerate(graph.calls):
        if place not in numbers:
            near = [producers[id(t)] for t in call.inputs if id(t) in producers]
            near += [consumers[id(t)] for t in call.outputs if id(t) in consumers]
            numbers[place] = next((numbers[n] for n in near if n in numbers), 0)
    return [numbers[place] for place in range(len(graph.calls))]
