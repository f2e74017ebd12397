"""Variables whose parts are stored on several devices.

To Keras such a variable is one `tf.Variable`: it is read, assigned and differentiated as a whole.
In a step that all devices compute, each has its part (`whole_variables`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import first, full_name
from keras_multigpu.engines.tensorflow.tensors import is_watched, knows_gradient
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.values import Tensor

# Whether a trace of one device is made, in the scope `whole_variables`.
_are_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("_are_whole", default=False)
# By the `id` of their link's handle
_DIVIDED: weakref.WeakValueDictionary[int, DividedVariable] = weakref.WeakValueDictionary()
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
        is_part: whether it is a part of another one, which tapes watch.

    Attributes:
        division: the argument.
        parts: a variable for each part that this process has, which may be divided again.
        link: what tapes watch.
        number: of those that several processes have parts of.
    """

    _should_act_as_resource_variable = True  # tapes then look for `handle`

    def __init__(
        self, value: np.ndarray, division: Division, like: tf.Variable, is_part: bool = False
    ):
        self.division = division
        self.parts: list[tf.Variable] = []
        pieces = np.split(value, np.cumsum(division.sizes)[:-1], division.axis)
        for number in division.own:
            piece, home = pieces[number], division.homes[number]
            if isinstance(home, Division):
                self.parts.append(DividedVariable(piece, home, like, True))
                continue
            with tf.device(home):
                self.parts.append(tf.Variable(piece, trainable=False, dtype=like.dtype))
        with tf.device(full_name(first("cpu"))):  # of this process
            self.link = tf.Variable(
                tf.zeros(division.shape, like.dtype),
                trainable=like.trainable and not is_part,
                dtype=like.dtype,
                synchronization=like.synchronization,
                aggregation=like.aggregation,
            )
            # Its shape is known, and it stores none of it. Whoever uses its value sees that.
            none = tf.fill([], tf.cast(float("nan"), like.dtype))
            tf.raw_ops.AssignVariableOp(resource=self.link.handle, value=none, validate_shape=False)
        _DIVIDED[id(self.link.handle)] = self
        self._name = like.name
        self._changed_in: Any = lambda: None  # the graph of the last assignment
        self._unique_id = like._unique_id  # by which optimizers know variables
        self.number = 0 if division.others is None else division.others.add(self, value)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} of {len(self.parts)} parts>"
        )

    handle = property(operator.attrgetter("link.handle"))
    graph = property(operator.attrgetter("link.handle.graph"))  # eager tensors have none
    device = property(operator.attrgetter("link.device"))
    dtype = property(operator.attrgetter("link.dtype"))
    trainable = property(operator.attrgetter("link.trainable"))
    synchronization = property(operator.attrgetter("link.synchronization"))
    aggregation = property(operator.attrgetter("link.aggregation"))
    name = property(operator.attrgetter("_name"))

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.division.shape)

    @property
    def leaves(self) -> list[tf.Variable]:
        """The variables of the parts, and of what these are divided into."""
        return [
            one
            for part in self.parts
            for one in (part.leaves if isinstance(part, DividedVariable) else [part])
        ]

    def value(self) -> Tensor:
        return self.link.value() if in_trace() else self.read_value()

    def read_value(self) -> Tensor:
        if in_trace():
            return self.link.read_value()
        graph = tf.compat.v1.get_default_graph()
        if type(graph).__name__ in _BODIES:
            # For gradients they make zeros like what they read, so they can't read the link.
            with graph.outer_graph.as_default():
                if self._changed_in() is not graph and is_watched(self.link.read_value()):
                    return self.read_value()
        with tf.device(self.device):
            whole = self._joined()
            link = self.link.read_value()
            # TensorFlow never forgets a graph that has custom gradients.
            return _linked(link, whole) if is_watched(link) else whole

    def _joined(self) -> Tensor:
        others, axis = self.division.others, self.division.axis
        if others is not None and tf.executing_eagerly():
            return tf.convert_to_tensor(others.read(self))
        own = tf.concat(self.read_parts(), axis)
        return own if others is None else others.join(own, self.division)

    def read_parts(self) -> list[Tensor]:
        """The parts' values, each on its device; no open tape sees them."""
        # A function that is traced now may be differentiated later.
        is_later = not tf.executing_eagerly() and not is_watched(self.link.read_value())
        found = []
        for number, part in zip(self.division.own, self.parts):
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
        if self.division.others is not None:
            return self.division.others.read(self)
        return np.concatenate([part.numpy() for part in self.parts], self.division.axis)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        return tf.convert_to_tensor(self.value(), dtype, name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _change(self, method: str, value: Any, *args: Any, **kwargs: Any) -> DividedVariable:
        """Changes the parts, each on its device."""
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value, self.dtype)
        if in_trace():
            getattr(self.link, method)(value)
            return self
        self._changed_in = weakref.ref(tf.compat.v1.get_default_graph())
        if not isinstance(value, tf.IndexedSlices):
            value.shape.assert_is_compatible_with(self.shape)
            if self.division.others is not None and tf.executing_eagerly():
                self.division.others.meet(self, value)
        for part, piece in zip(self.parts, self.division.split(value)):
            with on_device(part.device):
                getattr(part, method)(piece)
        return self

    assign = functools.partialmethod(_change, "assign")
    assign_add = functools.partialmethod(_change, "assign_add")
    assign_sub = functools.partialmethod(_change, "assign_sub")
    scatter_add = functools.partialmethod(_change, "scatter_add")
    scatter_sub = functools.partialmethod(_change, "scatter_sub")
    scatter_update = functools.partialmethod(_change, "scatter_update")

    def _serialize_to_tensors(self) -> Any:
        raise NotImplementedError  # Keras then writes the whole value

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"A SavedModel must have whole weights. Received: {self.name!r}, in parts on "
            f"{len(self.parts)} devices by `shard`, `model_devices` or `placement='spread'`. Call "
            "`parallel.export(path)`. For other ways to write a SavedModel, save "
            "`parallel.template` to a file, load it, and use the loaded model, which is whole."
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


@contextlib.contextmanager
def true_in(flag: contextvars.ContextVar[bool]) -> Iterator[None]:
    """Scope in which a flag is set."""
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def whole_variables() -> contextlib.AbstractContextManager[None]:
    """Scope of a trace of one device: a divided variable is its link, as if that were whole.

    Whoever runs the trace gives it the parts.
    """
    return true_in(_are_whole)


def in_trace() -> bool:
    """Whether a trace of one device is made."""
    return _are_whole.get() and not tf.executing_eagerly()


def divided_of(handle: Any) -> DividedVariable | None:
    """The divided variable of whose link this is the handle; `None` if there is none."""
    return _DIVIDED.get(id(handle))


def parts_of(variable: keras.Variable) -> Sequence[tf.Variable]:
    """The TensorFlow variables that store a variable's value: one, or those of its parts."""
    value = variable._value
    return value.leaves if isinstance(value, DividedVariable) else (value,)


def is_here(variable: keras.Variable) -> bool:
    """Whether this process has all of a variable."""
    division = division_of(variable)
    return division is None or division.is_here


def division_of(variable: Any) -> Division | None:
    """How a variable is divided; `None` if it is whole."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value.division if isinstance(value, DividedVariable) else None


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Scope of a device, also within Keras's scopes that put updates beside their variables."""
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True), tf.device(device):
        yield
