"""Traces a step as one device runs it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.partition.arguments import Argument, arguments
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import Elements, Sharded, Split, Value
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim
from keras_multigpu.engines.tensorflow.weights.divided import (
    divided_of,
    in_trace,
    true_in,
    whole_variables,
)
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
        self.arguments, restore = arguments(args, leaves, self.batch, have_rows, all_rows)

        specs = [one.spec for one in self.arguments]
        # As for XLA, if it compiles the step: branches then keep other values for the gradient.
        options = {"autograph": autograph, "jit_compile": compiled or None}

        def traced(creations: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
            def function(*tensors: Any) -> Any:
                with one_device(), whole_variables(), creations():
                    return step(*restore(tensors))

            return tf.function(function, **options).get_concrete_function(*specs)

        made: list[tf.Variable] = []
        self._traced = traced(lambda: variables_lifted(made))
        if made and not are_known(made):
            # As `tf.function` does: code may ask whether its variables exist.
            self._traced = traced(lambda: tf.variable_creator_scope(_refuse_variable))
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
        names = {id(one.handle): one.name.partition(":")[0] for one in self.graph.variables}
        for tensor, one in self._inputs():
            variable = divided_of(one.tensor)
            if one.has_rows and self._are_parts:
                item = planner.new_input(tensor.dtype, EACH)
                value = planner.value(tensor.dtype, one.dims, Split(0), item)
            elif variable is None:
                value = one.value(planner, are_even)
            else:
                value = _shards(planner, variable.division, devices)
            known[id(tensor)] = value
            value.variable = names.get(id(one.tensor), "")
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
        return [tf.shape(one)[0] - 1 for one in splits if one.shape[0] is None]


def _shards(planner: Planner, division: Division, devices: Sequence[str]) -> Value:
    """A variable that the devices have in parts."""
    width = len(devices) // planner.shares
    are_there = division.devices in [tuple(devices[column::width]) for column in range(width)]
    if not are_there or (division.is_again and not in_trace()):
        raise NeedsOthers  # other devices have it
    planner.shards[division.shape] = division.axis
    item = planner.new_input(tf.resource, EACH)
    layout, elements = Sharded(division.axis), Elements(dims=division.shape)
    return planner.value(tf.resource, None, layout, item, elements=elements)


def _parts_of(tensor: Any) -> list[Any]:
    """What each device has of a variable; nothing, of another tensor."""
    variable = divided_of(tensor)
    return [] if variable is None else [part.handle for part in variable.parts]


def _refuse_variable(next_creator: Any, **settings: Any) -> tf.Variable:
    name = settings.get("name") or "Variable"
    raise ValueError(
        "A step must make its variables once, and keep them. Received: a step that makes the "
        f"variable {name!r} each time it is traced. Make layers, optimizers, metrics and "
        "variables before the step."
    )


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
