"""Traces a step as one device runs it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    WHOLE,
    Elements,
    Sharded,
    Split,
    Value,
)
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim
from keras_multigpu.engines.tensorflow.weights.divided import divided_of, true_in, whole_variables
from keras_multigpu.engines.tensorflow.weights.division import Division

_UNEQUAL = (
    "All tensors of a batch must have the same number of rows, the length of their first axis."
)


_is_one_device: contextvars.ContextVar[bool] = contextvars.ContextVar("one_device", default=False)


def one_device() -> contextlib.AbstractContextManager[None]:
    """Scope of what is computed, or traced, as by one device."""
    return true_in(_is_one_device)


def is_one_device() -> bool:
    """Whether a step of one device runs, or is being traced: what it calls is a part of it."""
    return _is_one_device.get()


@dataclasses.dataclass
class Argument:
    """A tensor that a step takes.

    Attributes:
        tensor: it.
        dims: its dimensions, with the batch's symbol; `None` if their number isn't known.
        has_rows: whether the first axis is the batch.
        const: of the shape of a sparse tensor, whose rows are the batch's.
        even_dims: of a ragged tensor's splits, if it has as many rows as the batch.
        is_flat: whether it has the values of all rows of a ragged tensor.
    """

    tensor: Any
    dims: Any
    has_rows: bool = False
    const: Any = None
    even_dims: Any = None
    is_flat: bool = False

    @property
    def spec(self) -> tf.TensorSpec:
        """What the step is traced with."""
        shape = self.tensor.shape
        if self.has_rows and isinstance(self.dims[0], Dim):
            shape = [None, *shape[1:]]
        return tf.TensorSpec(shape, self.tensor.dtype)


def rows_of(leaves: Sequence[Any]) -> Any:
    """The number of rows of a batch: an `int`, `"unknown"` until the step runs, or `None`."""
    tensors = [one for one in leaves if tf.is_tensor(one) and one.shape.rank]
    others = [one for one in tensors if not isinstance(one, tf.RaggedTensor)]
    found = [one.shape[0] for one in others or tensors[:1]]
    known = {one for one in found if one is not None}
    if None in found:
        return "unknown"
    return known.pop() if len(known) == 1 else None


class Traced:
    """A step, traced as one device runs it.

    Args:
        step: a function of `args`.
        args: structures of tensors, and of other values.
        rows: the number of rows, as `rows_of` gives it.
        have_rows, autograph, compiled, are_known: as for `spread`.
        are_parts: whether each of several processes gives its rows of each tensor.
        is_one_row: whether every tensor has one row, which is planned as any number of rows is.

    Attributes:
        batch: that number, or its symbol.
        graph: what was traced.
        structure: the step's result.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        rows: Any,
        have_rows: Sequence[bool] | None = None,
        autograph: bool = False,
        compiled: bool = False,
        are_parts: bool = False,
        is_one_row: bool = False,
        are_known: Callable[[Sequence[tf.Variable]], bool] = lambda made: False,
    ):
        self.batch = Dim.symbol(BATCH) if rows == "unknown" else rows
        leaves, self._are_parts = tf.nest.flatten(args), are_parts
        all_rows = are_parts or is_one_row
        self.arguments, restore = _arguments(args, leaves, self.batch, have_rows, all_rows)

        made: list[tf.Variable] = []

        def function(*tensors: Any) -> Any:
            with one_device(), whole_variables(), variables_lifted(made):
                return step(*restore(tensors))

        specs = [one.spec for one in self.arguments]
        # As for XLA, if it compiles the step: branches then keep other values for the gradient.
        options = {"autograph": autograph, "jit_compile": compiled or None}
        self._traced = tf.function(function, **options).get_concrete_function(*specs)
        if made and not are_known(made):
            # As `tf.function` does: code may ask whether its variables exist.
            self._traced = tf.function(function, **options).get_concrete_function(*specs)
        self.graph = self._traced.graph
        self.structure = self._traced.structured_outputs

    def inputs(
        self, planner: Planner, devices: Sequence[str], *, are_even: bool = False
    ) -> dict[int, Any]:
        """The values of the graph's inputs, by their tensors' `id`s.

        `are_even`: whether ragged tensors have as many rows as the batch.
        """
        known: dict[int, Any] = {}
        handles = [one.handle for one in self.graph.trainable_variables]
        trained = {id(one) for handle in handles for one in (handle, *_parts_of(handle))}
        for tensor, one in self._inputs():
            variable = divided_of(one.tensor)
            if one.has_rows and self._are_parts:
                item = planner.new_input(tensor.dtype, EACH)
                value = planner.value(tensor.dtype, one.dims, Split(0), item)
            elif variable is None:
                value = _of_argument(planner, one, tensor.dtype, are_even)
            else:
                value = _shards(planner, variable.division, devices)
            value.const = one.const
            known[id(tensor)] = value
            if one.tensor.dtype == tf.resource and id(one.tensor) in trained:
                planner.trained.add(id(value))
        return known

    def given(self, replaced: Mapping[int, Any] | None = None) -> list[Any]:
        """The tensors of the graph's inputs, with others for arguments, by the `id`s of those."""
        return [
            (replaced or {}).get(id(one.tensor), _parts_of(one.tensor) or one.tensor)
            for _, one in self._inputs()
        ]

    def _inputs(self) -> list[tuple[Any, Argument]]:
        captured = {id(inside): outside for outside, inside in self.graph.captures}
        rest = iter(self.arguments)
        found = []
        for tensor in self.graph.inputs:
            if id(tensor) in captured:
                has_dims = tensor.dtype not in (tf.resource, tf.variant)
                dims = static_dims(tensor) if has_dims else None
                found.append((tensor, Argument(captured[id(tensor)], dims)))
            else:
                found.append((tensor, next(rest)))
        return found

    def inside(self, outside: Any) -> Any:
        """The graph's input that stands for a captured tensor; `None` if there is none."""
        return next((ours for one, ours in self.graph.captures if one is outside), None)

    def count(self) -> Any:
        """The number of rows, which all arguments must have."""
        if isinstance(self.batch, int):
            return self.batch
        counts = self._counts() or self._ragged_counts()[:1]
        checks = [tf.debugging.assert_equal(one, counts[0], _UNEQUAL) for one in counts[1:]]
        with tf.control_dependencies([one for one in checks if one is not None]):
            return tf.identity(counts[0]) if counts else 0

    def are_even(self, count: Any) -> Any:
        """Whether ragged tensors have as many rows as the batch; the step's run may know."""
        others = self._ragged_counts()[0 if self._counts() else 1 :]
        return tf.reduce_all(tf.equal(tf.stack(others), count)) if others else True

    def _counts(self) -> list[Any]:
        """The numbers of rows that tensors have, and sparse ones."""
        shapes = [one.tensor for one in self.arguments if one.const is not None]
        counts = [tf.shape(one.tensor)[0] for one in self.arguments if one.has_rows]
        return counts + [tf.cast(one[0], tf.int32) for one in shapes]

    def _ragged_counts(self) -> list[Any]:
        splits = [one.tensor for one in self.arguments if one.even_dims is not None]
        return [tf.shape(one)[0] - 1 for one in splits]


def _of_argument(planner: Planner, one: Argument, dtype: tf.DType, are_even: bool) -> Value:
    """What is on the first device; what has rows is split from there."""
    item, chosen = planner.new_input(dtype), planner.chosen
    has_rows, dims = one.has_rows, one.even_dims if are_even and one.even_dims else one.dims
    if one.is_flat and chosen is not None and not chosen.are_fixed:
        has_rows, dims = True, (planner.new_rows(item), *dims[1:])
    value = planner.value(dtype, dims, WHOLE, item)
    value.layout = Split(0) if has_rows else WHOLE
    return value


def _shards(planner: Planner, division: Division, devices: Sequence[str]) -> Value:
    """A variable that the devices have in parts."""
    if division.devices != tuple(devices):
        raise NeedsOthers  # other devices have it
    planner.shards[division.shape] = division.axis
    item = planner.new_input(tf.resource, EACH)
    layout, elements = Sharded(division.axis), Elements(dims=division.shape)
    return planner.value(tf.resource, None, layout, item, elements=elements)


def _parts_of(tensor: Any) -> list[Any]:
    """What each device has of a variable; nothing, of another tensor."""
    variable = divided_of(tensor)
    return [] if variable is None else [part.handle for part in variable.parts]


def _arguments(
    args: Any, leaves: Sequence[Any], batch: Any, have_rows: Sequence[bool] | None, all_rows: bool
) -> tuple[list[Argument], Callable[[Sequence[Any]], Any]]:
    """The tensors of a step's arguments, and a function that puts others in their places."""
    found: list[Argument] = []
    for number, leaf in enumerate(leaves):
        may_have_rows = have_rows is None or have_rows[number]
        if isinstance(leaf, tf.SparseTensor) and may_have_rows:
            dims: Any = (batch, *leaf.shape.as_list()[1:])
            const = constant_of([*dims]) if None not in dims else None
            found += [
                Argument(leaf.indices, (None, len(dims))),
                Argument(leaf.values, (None,)),
                Argument(leaf.dense_shape, (len(dims),), const=const),
            ]
        elif isinstance(leaf, tf.Tensor):
            rank = leaf.shape.rank
            dims = static_dims(leaf)
            is_batch = all_rows or (bool(rank) and dims[0] in (None, batch))
            has_rows = bool(rank) and may_have_rows and is_batch
            found.append(Argument(leaf, (batch, *dims[1:]) if has_rows else dims, has_rows))
        elif tf.is_tensor(leaf):
            splits = (
                leaf.row_splits if isinstance(leaf, tf.RaggedTensor) and may_have_rows else None
            )
            for one in tf.nest.flatten(leaf, expand_composites=True):
                even_dims = (batch + 1,) if one is splits and batch is not None else None
                is_flat = splits is not None and one is leaf.flat_values and one.shape[0] is None
                found.append(Argument(one, static_dims(one), even_dims=even_dims, is_flat=is_flat))

    def restore(tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        flat = tf.nest.flatten(args, expand_composites=True)
        return tf.nest.pack_sequence_as(
            args, [next(rest) if tf.is_tensor(one) else one for one in flat], expand_composites=True
        )

    return found, restore


@contextlib.contextmanager
def variables_lifted(made: list[tf.Variable]) -> Iterator[None]:
    """Scope in which the variables that a trace creates exist at once; adds them to `made`."""
    names = (
        "initial_value trainable validate_shape name dtype constraint synchronization aggregation "
        "shape"
    ).split()

    def create(next_creator: Any, **settings: Any) -> tf.Variable:
        chosen = {name: settings[name] for name in names if name in settings}
        first = chosen.get("initial_value")
        if tf.is_tensor(first) and not hasattr(first, "numpy"):
            chosen["initial_value"] = tf.get_static_value(first)
            if chosen["initial_value"] is None:
                return next_creator(**settings)  # TensorFlow finds the value outside, or says so
        in_fresh_thread(lambda: made.append(tf.Variable(**chosen)))
        return made[-1]

    with tf.variable_creator_scope(create):
        yield
