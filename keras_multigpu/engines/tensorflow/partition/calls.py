"""A call of a model outside a partitioned step: forward now, backward if a tape asks for it.

Both come from one trace, so that the gradient is that of what was computed, with the same random
numbers. What the backward pass needs stays on the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.emission import Writer
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE
from keras_multigpu.engines.tensorflow.partition.local import Devices
from keras_multigpu.engines.tensorflow.partition.planner import Planner, Record
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.step import Traced, one_device, rows_of

_ONCE = (
    "The second derivative of a call of a parallel model is known only inside a step that runs on "
    "all devices. Put both gradients into one: `step = parallel.function(step)`, or `train_step`."
)


def call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[str],
    *,
    wire_dtype: str | None = None,
    records: list[Record] | None = None,
) -> Any:
    """The tensors of `function(*args)`, a structure, with gradients, computed by several devices.

    Called while a graph is built.
    """
    rows = rows_of(tf.nest.flatten(args))
    if rows in (None, 0, 1):
        with one_device():
            return function(*args)
    backward = _Backward()
    traced = Traced(lambda *inside: backward.record(function, inside), args, rows)
    inputs = [one.tensor for one in traced.arguments if one.tensor.dtype.is_floating]
    plan = _Plan(traced, backward, devices, [] if records is None else records)
    weights = [tf.convert_to_tensor(one) for one in plan.variables]
    outputs: list[Any] = []
    scope = Devices(devices, traced.count(), wire_dtype=wire_dtype)

    @tf.custom_gradient
    def joined(*floats: Any) -> Any:
        given = dict(zip(map(id, inputs), floats))
        writer = plan.writer(scope, given, floats[len(inputs) :])
        outputs[:] = writer.write(plan.outputs, until=plan.forward)

        def gradient(*upstream: Any) -> list[Any]:
            for item, tensor in zip(plan.upstream, upstream):
                writer.give(item, tensor)
            found = writer.write(plan.gradients)
            rest = iter(_only_once(*found) if found else ())
            return [None if one is None else next(rest) for one in backward.gradients]

        return [one for one in outputs if one.dtype.is_floating], gradient

    made = iter(joined(*inputs, *weights))
    flat = [next(made) if one.dtype.is_floating else one for one in outputs]
    return tf.nest.pack_sequence_as(backward.structure, flat, expand_composites=True)


class _Plan:
    """The program of a call and of its gradient.

    Attributes:
        variables: those that may get gradients.
        outputs: the items of the call's outputs.
        gradients: the items of the gradients.
        upstream: the items of the outputs' gradients, which the tape gives.
        forward: how many nodes compute the outputs.
    """

    def __init__(
        self, traced: Traced, backward: _Backward, devices: Sequence[str], records: list[Record]
    ):
        planner = Planner(RULES, len(devices), traced.batch, records)
        self._traced, self._planner = traced, planner
        self.variables = [one for one in backward.sources if isinstance(one, tf.Variable)]
        known, _ = traced.inputs(planner)
        for variable in self.variables:
            # Read outside, where the tape sees it; the trace reads it where nothing has changed it.
            handle = known[id(traced.inside(variable.handle))]
            dims, dtype = tuple(variable.shape.as_list()), variable.dtype
            value = planner.value(dtype, dims, WHOLE, planner.new_input(dtype))
            value.is_trained = True
            planner.cache["read", id(handle), 0, dtype] = value
        results = planner.run_graph(traced.graph, known, backward.outputs, slice(backward.begin))
        self.outputs = [planner.get(value, WHOLE) for value in results]
        self.forward = len(planner.program.nodes)
        floats = [value for value in results if value.dtype.is_floating]
        self.upstream = [planner.new_input(value.dtype) for value in floats]
        for tensor, item, like in zip(backward.upstream, self.upstream, floats):
            known[id(tensor)] = planner.value(like.dtype, like.dims, WHOLE, item)
            known[id(tensor)].layout = like.layout if like.axis is not None else WHOLE
        wanted = [one for one in backward.gradients if one is not None]
        found = planner.run_graph(traced.graph, known, wanted, slice(backward.begin, None))
        self.gradients = [planner.get(value, WHOLE) for value in found]
        planner.program.outputs = [*self.outputs, *self.gradients]

    def writer(self, scope: Devices, floats: Mapping[int, Any], weights: Sequence[Any]) -> Writer:
        """Writes the program, with these arguments and weights."""
        given = self._traced.given(floats)
        return Writer(self._planner.program, scope, [*given, *weights])


@tf.custom_gradient
def _only_once(*gradients: Any) -> Any:
    def second(*upstream: Any) -> Any:
        raise NotImplementedError(_ONCE)

    return list(map(tf.identity, gradients)), second


@dataclasses.dataclass
class _Backward:
    """What the trace of a call notes for its gradient."""

    outputs: list[Any] = dataclasses.field(default_factory=list)
    structure: Any = None
    sources: list[Any] = dataclasses.field(default_factory=list)
    upstream: list[Any] = dataclasses.field(default_factory=list)
    is_float: list[bool] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)
    begin: int = 0

    def record(self, function: Callable[..., Any], args: Any) -> list[Any]:
        """Calls the function, and traces its gradient by inputs and variables."""
        inputs = [
            one
            for one in tf.nest.flatten(args, expand_composites=True)
            if tf.is_tensor(one) and one.dtype.is_floating
        ]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            self.structure = function(*args)
            self.outputs = [
                tf.identity(one) for one in tf.nest.flatten(self.structure, expand_composites=True)
            ]
        self.begin = len(tf.compat.v1.get_default_graph().get_operations())
        self.sources = [*inputs, *tape.watched_variables()]
        self.is_float = [one.dtype.is_floating for one in self.outputs]
        floats = [one for one in self.outputs if one.dtype.is_floating]
        self.upstream = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in floats]
        self.gradients = tape.gradient(floats, self.sources, self.upstream)
        self.gradients = [None if g is None else tf.convert_to_tensor(g) for g in self.gradients]
        return self.outputs
