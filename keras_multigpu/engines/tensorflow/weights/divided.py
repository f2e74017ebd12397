"""Variables whose parts are stored on several devices.

To Keras such a variable is one `tf.Variable`: it is read, assigned and differentiated as a whole.
The exchange and the optimizer (`exchange.py`, `placing.py`) use the parts, each on its own device.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.tensors import is_watched, knows_gradient
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.values import Tensor

# What the variables of a division stand for, in the scope `acting_as`: a part, by its number.
_acting: contextvars.ContextVar[tuple[Division, int] | None]
_acting = contextvars.ContextVar("_acting", default=None)
# Where divided variables say that they are, in the scope `shown_on`.
_shown: contextvars.ContextVar[str | None] = contextvars.ContextVar("_shown", default=None)
_LINKED = "KerasMultigpuLinked"
"""The gradient of a part that is read where no tape is open yet."""
# The graphs of loops and branches.
_BODIES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


class DividedVariable(tf.Variable, tf.__internal__.types.Tensor):
    """A variable made of several; tapes take gradients by its `link`, which stores no weight.

    Args:
        value: the whole value.
        division: where its parts go.
        like: the `tf.Variable` that it replaces.

    Attributes:
        division: the argument.
        parts: a variable for each part.
        link: what tapes watch.
    """

    _should_act_as_resource_variable = True  # tapes then look for `handle`

    def __init__(self, value: np.ndarray, division: Division, like: tf.Variable):
        self.division = division
        self.parts: list[tf.Variable] = []
        pieces = np.split(value, np.cumsum(division.sizes)[:-1], division.axis)
        for piece, device in zip(pieces, division.devices):
            with tf.device(device):
                self.parts.append(tf.Variable(piece, trainable=False, dtype=like.dtype))
        with tf.device(division.devices[0]):
            self.link = tf.Variable(
                # Whoever uses its value (in a `tf.custom_gradient`, say) sees that it is none.
                tf.fill([], tf.cast(float("nan"), like.dtype)),
                trainable=like.trainable,
                dtype=like.dtype,
                shape=tf.TensorShape(None),  # its gradient has the shape of the whole value
            )
        self._name = like.name
        self._changed_in: Any = lambda: None  # the graph of the last assignment
        self._synchronization, self._aggregation = like.synchronization, like.aggregation
        self._unique_id = like._unique_id  # by which optimizers know variables

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} of {len(self.parts)} parts>"
        )

    @property
    def _part(self) -> tf.Variable | None:
        """The part that this variable stands for now."""
        division, number = _acting.get() or (None, 0)
        return self.parts[number] if division == self.division else None

    @property
    def handle(self) -> Tensor:
        part = self._part
        return (self.link if part is None else part).handle

    @property
    def graph(self) -> Any:
        return self.handle.graph  # eager tensors have none

    @property
    def device(self) -> str:
        part = self._part
        return _shown.get() or (self.link if part is None else part).device

    @property
    def shape(self) -> tf.TensorShape:
        part = self._part
        return tf.TensorShape(self.division.shape) if part is None else part.shape

    @property
    def dtype(self) -> tf.DType:
        return self.link.dtype

    @property
    def name(self) -> str:
        return self._name

    @property
    def trainable(self) -> bool:
        return self.link.trainable

    @property
    def synchronization(self) -> tf.VariableSynchronization:
        return self._synchronization

    @property
    def aggregation(self) -> tf.VariableAggregation:
        return self._aggregation

    def value(self) -> Tensor:
        return self.read_value()

    def read_value(self) -> Tensor:
        part = self._part
        if part is not None:
            return part.read_value()
        graph = tf.compat.v1.get_default_graph()
        if type(graph).__name__ in _BODIES:
            # For gradients they make zeros like what they read, so they can't read the link.
            with graph.outer_graph.as_default():
                if self._changed_in() is not graph and is_watched(self.link.read_value()):
                    return self.read_value()
        with tf.device(self.device):
            whole = tf.concat(self.read_parts(), self.division.axis)
            link = self.link.read_value()
            # TensorFlow never forgets a graph that has custom gradients.
            return _linked(link, whole) if is_watched(link) else whole

    def read_parts(self) -> list[Tensor]:
        """The parts' values, each on its device; no open tape sees them."""
        # A function that is traced now may be differentiated later.
        is_later = not tf.executing_eagerly() and not is_watched(self.link.read_value())
        found = []
        for number, part in enumerate(self.parts):
            with tf.device(part.device):
                value = part.read_value()
                found.append(self._linked_later(value, number) if is_later else value)
        return found

    def _linked_later(self, value: Tensor, number: int) -> Tensor:
        """A part's value in a graph; its gradient is its part of the link's."""
        division = self.division
        before = division.start_of(number)
        after = division.shape[division.axis] - before - division.sizes[number]
        edges = [(0, 0)] * len(division.shape)
        edges[division.axis] = before, after
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": _LINKED}):
            inputs = [value, self.link.read_value(), tf.constant(edges)]
            return tf.raw_ops.IdentityN(input=inputs)[0]

    def numpy(self) -> np.ndarray:
        part = self._part
        if part is not None:
            return part.numpy()
        return np.concatenate([part.numpy() for part in self.parts], self.division.axis)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("assign", tf.convert_to_tensor(value, self.dtype))

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("assign_add", tf.convert_to_tensor(delta, self.dtype))

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("assign_sub", tf.convert_to_tensor(delta, self.dtype))

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        return self._change("scatter_update", sparse_delta)

    def _change(self, method: str, value: Tensor) -> DividedVariable:
        """Changes the parts, each on its device, or the one that this variable stands for."""
        if self._part is not None:
            getattr(self._part, method)(value)
            return self
        self._changed_in = weakref.ref(tf.compat.v1.get_default_graph())
        if not isinstance(value, tf.IndexedSlices):
            value.shape.assert_is_compatible_with(self.shape)
        for part, piece in zip(self.parts, self.division.split(value)):
            with on_device(part.device):
                getattr(part, method)(piece)
        return self

    def _serialize_to_tensors(self) -> Any:
        raise NotImplementedError  # Keras then writes the whole value

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "A SavedModel must have whole weights. Received: the template of a model made with "
            f"`shard`, whose weight {self.name!r} is divided over {len(self.parts)} devices. Call "
            "`export` of the parallel model, or of a model that has loaded the file."
        )

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        raise NotImplementedError  # Keras then assigns the whole value


@tf.custom_gradient
def _linked(link: Tensor, whole: Tensor) -> Any:
    """The whole value; its gradient is that of the link."""
    return tf.identity(whole), lambda upstream: (upstream, None)


def _gradient_of_linked(operation: tf.Operation, *upstream: Tensor) -> list[Tensor | None]:
    return [upstream[0], tf.pad(upstream[0], operation.inputs[2]), None]


if not knows_gradient(_LINKED):  # this module may be loaded again
    tf.RegisterGradient(_LINKED)(_gradient_of_linked)


def parts_of(variable: keras.Variable) -> Sequence[tf.Variable]:
    """The TensorFlow variables that store a variable's value: one, or those of its parts."""
    value = variable._value
    return value.parts if isinstance(value, DividedVariable) else (value,)


def division_of(variable: Any) -> Division | None:
    """How a variable is divided; `None` if it is whole."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value.division if isinstance(value, DividedVariable) else None


@contextlib.contextmanager
def acting_as(division: Division, number: int) -> Iterator[None]:
    """Scope in which every variable of this division is its part of this number."""
    token = _acting.set((division, number))
    try:
        yield
    finally:
        _acting.reset(token)


@contextlib.contextmanager
def shown_on(device: str) -> Iterator[None]:
    """Scope in which divided variables say that they are on a device: Keras makes slots there."""
    token = _shown.set(device)
    try:
        yield
    finally:
        _shown.reset(token)


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Scope of a device, also within Keras's scopes that put updates beside their variables."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True), tf.device(device):
        yield
