"""Variables whose parts are stored on several devices.

To Keras such a variable is one `tf.Variable`: it is read, assigned and differentiated as a whole.
The exchange and the optimizer (`exchange.py`, `placing.py`) use the parts, each on its own device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.tensors import is_watched
from keras_multigpu.engines.values import Tensor

# The number of the part that all divided variables stand for, in the scope `acting_as`.
_acting: contextvars.ContextVar[int | None] = contextvars.ContextVar("_acting", default=None)


@dataclasses.dataclass(frozen=True)
class Division:
    """How a variable is divided: part `i`, `sizes[i]` long on the axis, is on `devices[i]`."""

    devices: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...]

    @classmethod
    def even(cls, shape: Sequence[int], devices: Sequence[str]) -> Division | None:
        """Divides the longest axis as evenly as it goes; `None` if no axis is long enough."""
        axis = max(range(len(shape)), key=shape.__getitem__, default=None)
        if axis is None or shape[axis] < len(devices):
            return None
        each, left = divmod(shape[axis], len(devices))
        sizes = (each + (place < left) for place in range(len(devices)))
        return cls(tuple(devices), axis, tuple(sizes))

    def split(self, value: Tensor) -> list[Tensor]:
        """The parts of a dense value, or of the rows of a sparse gradient."""
        if not isinstance(value, tf.IndexedSlices):
            return tf.split(value, self.sizes, self.axis)
        if self.axis:
            pieces = tf.split(value.values, self.sizes, self.axis)
            return [tf.IndexedSlices(piece, value.indices) for piece in pieces]
        found, start = [], 0
        for size in self.sizes:
            is_own = (value.indices >= start) & (value.indices < start + size)
            rows = tf.boolean_mask(value.indices, is_own) - start
            shape = tf.constant([size, *value.values.shape[1:]], value.indices.dtype)
            found.append(tf.IndexedSlices(tf.boolean_mask(value.values, is_own), rows, shape))
            start += size
        return found


class DividedVariable(tf.Variable):
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
                tf.zeros([], like.dtype),
                trainable=like.trainable,
                dtype=like.dtype,
                shape=tf.TensorShape(None),  # its gradient has the shape of the whole value
            )
        self._shape, self._name = tf.TensorShape(value.shape), like.name
        self._synchronization, self._aggregation = like.synchronization, like.aggregation
        self._unique_id = like._unique_id  # by which optimizers know variables

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} of {len(self.parts)} parts>"
        )

    @property
    def _stored(self) -> tf.Variable:
        """The part that this variable stands for now; else its link."""
        number = _acting.get()
        return self.link if number is None else self.parts[number]

    @property
    def handle(self) -> Tensor:
        return self._stored.handle

    @property
    def graph(self) -> Any:
        return self.handle.graph  # eager tensors have none

    @property
    def device(self) -> str:
        return self._stored.device

    @property
    def shape(self) -> tf.TensorShape:
        return self._shape if _acting.get() is None else self._stored.shape

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
    def _trainable(self) -> bool:
        return self.link.trainable

    @_trainable.setter
    def _trainable(self, value: bool) -> None:
        self.link._trainable = value  # Keras sets this one

    @property
    def synchronization(self) -> tf.VariableSynchronization:
        return self._synchronization

    @property
    def aggregation(self) -> tf.VariableAggregation:
        return self._aggregation

    def value(self) -> Tensor:
        return self.read_value()

    def read_value(self) -> Tensor:
        if _acting.get() is not None:
            return self._stored.read_value()
        with tf.device(self.device):
            whole = tf.concat(self.read_parts(), self.division.axis)
            link = self.link.read_value()
            # TensorFlow never forgets a graph that has custom gradients.
            return _linked(link, whole) if is_watched(link) else whole

    def read_parts(self) -> list[Tensor]:
        """The parts' values, each on its device; no tape sees them."""
        found = []
        for part in self.parts:
            with tf.device(part.device):
                found.append(part.read_value())
        return found

    def numpy(self) -> np.ndarray:
        if _acting.get() is not None:
            return self._stored.numpy()
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
        if _acting.get() is not None:
            getattr(self._stored, method)(value)
            return self
        if not isinstance(value, tf.IndexedSlices):
            value = tf.broadcast_to(value, self.shape)
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


def parts_of(variable: keras.Variable) -> Sequence[tf.Variable]:
    """The TensorFlow variables that store a variable's value: one, or those of its parts."""
    value = variable._value
    return value.parts if isinstance(value, DividedVariable) else (value,)


def division_of(variable: Any) -> Division | None:
    """How a variable is divided; `None` if it is whole."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value.division if isinstance(value, DividedVariable) else None


@contextlib.contextmanager
def acting_as(number: int) -> Iterator[None]:
    """Scope in which every divided variable is its part of this number."""
    token = _acting.set(number)
    try:
        yield
    finally:
        _acting.reset(token)


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Scope of a device, also within Keras's scopes that put updates beside their variables."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True), tf.device(device):
        yield
