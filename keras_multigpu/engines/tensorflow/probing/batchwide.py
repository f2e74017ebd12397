"""Finds what the results of a traced call have of its batch as a whole: its largest value, say.

Made-up rows may not show it. What it does may be less than rounding, or begin beyond a threshold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.probing.places import sees_places
from keras_multigpu.engines.tensorflow.tracing.functions import bodies_of
from keras_multigpu.engines.values import Tensor

# The sizes of a batch are no values of its rows.
_SIZES = {"Shape", "ShapeN", "Size"}
_OF_SIZES = {*_SIZES, "Rank", "ZerosLike", "OnesLike"}
_LINEAR = {
    *("Add", "AddN", "AddV2", "Mean", "Neg", "Sub", "Sum"),
    *("Identity", "IdentityN", "PreventGradient", "StopGradient"),
    *("BroadcastTo", "ConcatV2", "ExpandDims", "GatherV2", "Pack", "Reshape", "Squeeze"),
    *("StridedSlice", "Tile", "Transpose", "Unpack"),
}
# Linear in each input.
_PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan"}
_QUOTIENTS = {"DivNoNan", "RealDiv"}
_EXTREMES = {"All", "Any", "Max", "Min"}
_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"}
# A number of rows changes what these give at some numbers only.
_STEPS = {
    *("Ceil", "ClipByValue", "Floor", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Mod", "Relu"),
    *("Round", "Sign", "TruncateDiv", "TruncateMod", *_COMPARISONS),
}


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a tensor has of a batch.

    Attributes:
        of_rows: whether it is computed from the values of rows.
        maker: the operation that made the number of all rows that it has, or `None`.
        is_extreme: whether that number is an extreme, and the only one.
        is_curved: whether it is no linear function of such numbers: no sum or mean over rows then.
        has_count: whether it has an integer of all rows: their largest length, say.
        of_size: whether it is computed from the number of rows.
        is_stepped: whether it is another one for some numbers of rows only.
    """

    of_rows: bool = False
    maker: Any = None
    is_extreme: bool = False
    is_curved: bool = False
    has_count: bool = False
    of_size: bool = False
    is_stepped: bool = False

    def __or__(self, other: Traits) -> Traits:
        one = self if self.maker else other
        both = self.maker and other.maker
        return Traits(
            self.of_rows or other.of_rows,
            one.maker,
            one.is_extreme and (not both or (other.is_extreme and self.maker is other.maker)),
            self.is_curved or other.is_curved,
            self.has_count or other.has_count,
            self.of_size or other.of_size,
            self.is_stepped or other.is_stepped,
        )


_NONE = Traits()
ROWS = Traits(of_rows=True)


class BatchWide:
    """The numbers of a whole batch in a traced graph, and where they go.

    Args:
        graph: the graph, traced for any number of rows.
        given: what is known of its arguments, by their `id`.

    Attributes:
        loops_by_rows: whether the values of rows say how long a loop runs.
        sees_places: whether the places of rows, or their number, may have an effect.
    """

    def __init__(self, graph: Any, given: Mapping[int, Traits]):
        self.loops_by_rows = False
        self.sees_places = False
        self._traits = dict(given)
        for operation in graph.get_operations():
            found = self._follow(operation)
            pairs = zip(operation.outputs, found)
            self._traits.update((id(one), traits) for one, traits in pairs if traits != _NONE)

    @classmethod
    def of_call(cls, graph: Any, batch: Sequence[Tensor]) -> BatchWide:
        """Of a call whose arguments are `batch`."""
        return cls(graph, {id(one): ROWS for one in batch if has_rows(one)})

    def traits(self, tensor: Tensor) -> Traits:
        """What is known of a tensor."""
        return self._traits.get(id(tensor), _NONE)

    def takes_single_row(self, operation: Any) -> bool:
        """Whether an operation of a loop takes a row from a list of rows."""
        if operation.type != "TensorListGetItem":
            return False
        (item,) = operation.outputs
        return self.traits(item).of_rows and not has_rows(item)

    def _follow(self, operation: Any) -> Sequence[Traits]:
        """What is known of an operation's outputs."""
        given = [self.traits(one) for one in operation.inputs]
        every = sum_of(given)
        if every == _NONE:
            return ()
        self.sees_places |= every.of_rows and sees_places(operation)
        self.sees_places |= every.of_size and _is_of_number(operation)
        if operation.type in _OF_SIZES:
            is_size = operation.type in _SIZES and every.of_rows
            return [Traits(of_size=True) if is_size else _NONE for _ in operation.outputs]
        if operation.type == "IdentityN":
            return given
        bodies = bodies_of(operation)
        found = self._after_bodies(operation, bodies, given) if bodies else None
        if found is not None:
            return found
        if operation.type == "StridedSlice" and _is_of_another_axis(operation):
            return ()
        if operation.type == "Equal" and _is_always_true(operation):
            return ()
        if every.maker and operation.type == "Mul" and any(map(_is_zero, operation.inputs)):
            return ()
        is_curved = every.is_curved or (bool(every.maker) and not _is_linear(operation, given))
        is_stepped = every.is_stepped or (every.of_size and _has_steps(operation))
        known = dataclasses.replace(every, is_curved=is_curved, is_stepped=is_stepped)
        return [_of_output(one, known, operation) for one in operation.outputs]

    def _after_bodies(
        self, operation: Any, bodies: Sequence[Any], given: list[Traits]
    ) -> list[Traits] | None:
        """What is known of the results of branches, a function or a loop; `None`: nothing is."""
        if operation.type.endswith("While"):
            condition, body = bodies
            return self._after_loop(condition, body, given)
        chosen = given[: len(given) - len(bodies[0].inputs)]
        choice = dataclasses.replace(sum_of(chosen), of_size=False)
        if choice.of_rows:
            choice |= Traits(maker=operation, is_curved=True)
        results = [choice] * len(operation.outputs)
        for body in bodies:
            inner = self._within(body, given[len(chosen) :])
            results = [one | inner.traits(end) for one, end in zip(results, body.outputs)]
        return results

    def _after_loop(self, condition: Any, body: Any, given: list[Traits]) -> list[Traits] | None:
        """What is known of a loop's results; `None` if it takes single rows, like numbers."""
        while True:
            inner = self._within(body, given)
            results = [one | inner.traits(end) for one, end in zip(given, body.outputs)]
            if results == given:
                break
            given = results
        ends = self._within(condition, given)
        self.loops_by_rows |= any(ends.traits(one).of_rows for one in condition.outputs)
        return None if any(map(inner.takes_single_row, body.get_operations())) else results

    def _within(self, body: Any, given: Sequence[Traits]) -> BatchWide:
        pairs = zip(body.inputs, given)
        found = BatchWide(body, {id(one): traits for one, traits in pairs})
        self.loops_by_rows |= found.loops_by_rows
        self.sees_places |= found.sees_places
        return found


def sum_of(every: Sequence[Traits]) -> Traits:
    """What is known of something that is computed from tensors."""
    found = _NONE
    for one in every:
        found |= one
    return found


def has_rows(tensor: Tensor) -> bool:
    """Whether the graph does not know all axes of a tensor: it may have the batch's rows."""
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def _of_output(output: Tensor, known: Traits, operation: Any) -> Traits:
    if has_rows(output):
        return dataclasses.replace(known, of_size=False, is_stepped=False)
    if not known.of_rows:
        return known
    if output.dtype.is_integer:  # they are sizes, as a rule, and seldom have an effect
        return dataclasses.replace(known, has_count=True, of_size=False)
    is_number = output.dtype.is_floating or output.dtype == tf.bool
    if not is_number or known.maker:
        return dataclasses.replace(known, of_size=False)
    is_choice = output.dtype == tf.bool and operation.type not in ("All", "Any")
    return dataclasses.replace(
        known,
        maker=operation,
        is_extreme=operation.type in _EXTREMES,
        is_curved=known.is_curved or is_choice,
        of_size=False,
    )


def _is_linear(operation: Any, given: Sequence[Traits]) -> bool:
    if operation.type == "Cast":
        return operation.outputs[0].dtype.is_floating
    of_rows = [one.of_rows for one in given]
    if operation.type in _PRODUCTS:
        return sum(of_rows) == 1
    if operation.type in _QUOTIENTS:
        return not of_rows[1]
    return operation.type in _LINEAR


def _is_of_number(operation: Any) -> bool:
    """Whether an operation on a number of rows makes it more than a part of a shape."""
    is_factor = operation.type == "Cast" and operation.outputs[0].dtype.is_floating
    return is_factor or operation.type == "Range" or _has_steps(operation)


def _has_steps(operation: Any) -> bool:
    """Whether an operation on a number of rows gives the same for many of them."""
    if operation.type not in _STEPS:
        return False
    # `max(n, 1)` and `n > 0` are the same for all.
    values = [tf.get_static_value(one) for one in operation.inputs]
    known = [value for value in values if value is not None and value.ndim == 0]
    if operation.type == "Maximum":
        return not any(value <= 1 for value in known)
    return operation.type not in _COMPARISONS or not any(value <= 0 for value in known)


def _is_of_another_axis(operation: Any) -> bool:
    """Whether an operation takes a shape's axis that is not the first."""
    if operation.inputs[0].op.type not in _SIZES:
        return False
    begin = tf.get_static_value(operation.inputs[1])
    return begin is not None and bool(begin[0] > 0)


def _is_always_true(operation: Any) -> bool:
    """Whether a flag is compared with itself: `tf.recompute_grad` so waits for the gradient."""
    first, second = operation.inputs
    return first is second and first.dtype == tf.bool


def _is_zero(tensor: Tensor) -> bool:
    """Whether a tensor is a constant of zeros, by which code keeps a value without an effect."""
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()
