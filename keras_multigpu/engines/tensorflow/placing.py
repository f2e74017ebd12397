"""Variables on other devices; an optimizer whose slots are with them, and are updated there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.optimizers import clip_by, inner_optimizers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.values import Tensor


def place_updates(optimizer: keras.Optimizer) -> None:
    """Has an optimizer make and update the slots of a variable on that variable's device.

    Its own methods would make all of them on the first device, and send the gradients and the
    weights there in every step.
    """
    if "update_step" in vars(optimizer):
        return  # placed already
    for inner in inner_optimizers(optimizer):
        place_updates(inner)
    make_slot, update = optimizer.add_variable_from_reference, optimizer.update_step

    def make_slot_there(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(_device_of(reference_variable)):
            return make_slot(reference_variable, *args, **kwargs)

    def update_there(gradient: Any, variable: Any, *args: Any) -> None:
        with tf.device(_device_of(variable)):
            update(_before_reduction(gradient), variable, *args)

    optimizer.add_variable_from_reference = make_slot_there
    optimizer.update_step = update_there


def clip_by_member(
    optimizer: keras.Optimizer, members: Callable[[], Sequence[Sequence[keras.Variable]]]
) -> None:
    """Has an optimizer clip the gradients of each member of a committee by themselves."""
    if "_clip_gradients" in vars(optimizer):
        return  # done already
    original, build = optimizer._clip_gradients, optimizer.build

    def clip(gradients: Sequence[Tensor], variables: Sequence[keras.Variable]) -> list[Tensor]:
        clipped = list(gradients)
        for member in members():
            own = set(map(id, member))
            places = [place for place, one in enumerate(variables) if id(one) in own]
            if places:
                with tf.device(_device_of(variables[places[0]])):
                    parts = original([gradients[place] for place in places])
                for place, part in zip(places, parts):
                    clipped[place] = part
        return clipped

    def build_all(variables: Sequence[keras.Variable]) -> None:
        build(variables)
        for inner in inner_optimizers(optimizer):  # some are made by the building
            clip_by_member(inner, members)

    clip_by(optimizer, clip)
    optimizer.build = build_all
    for inner in inner_optimizers(optimizer):
        clip_by_member(inner, members)


def move_variable(variable: keras.Variable, device: str) -> bool:
    """Moves a variable to a device, with its value; whether it was elsewhere.

    TensorFlow has no such operation: Keras's variable is given another one of TensorFlow's.
    What was traced with the old one fails from then on: its resource is taken away, so that
    nothing goes on with values that are no longer the variable's.
    """
    old = variable._value
    if old.device == full_name(device):
        return False
    with tf.init_scope(), tf.device(device):
        variable._value = tf.Variable(
            old.read_value(),
            trainable=old.trainable,
            name=variable.name,
            dtype=old.dtype,
            synchronization=old.synchronization,
            aggregation=old.aggregation,
        )
        tf.raw_ops.DestroyResourceOp(resource=old.handle, ignore_lookup_error=True)
    return True


def move_variables(homes: Sequence[tuple[keras.Variable, str]], model: keras.Model) -> None:
    """Moves variables, each to the device beside it; drops what their model traced before."""
    moved = [move_variable(variable, full_name(device)) for variable, device in homes]
    if any(moved):
        use_moved(model)


def knows_others(model: Any) -> bool:
    """Whether a model's optimizer knows variables that have moved since it was built."""
    return any(map(_knows_others, _optimizers(model)))


def use_moved(model: Any) -> None:
    """Has a model, and its optimizer, use variables that were moved."""
    model.train_function = model.test_function = model.predict_function = None
    for optimizer in _optimizers(model):
        # Keras knows variables by TensorFlow's, which are others now.
        optimizer._trainable_variables_indices = {
            optimizer._var_key(variable): place
            for place, variable in enumerate(optimizer._trainable_variables)
        }


def _optimizers(model: Any) -> Iterator[keras.Optimizer]:
    """A model's optimizer, if it has been built, and the one within it."""
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None and optimizer.built:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _knows_others(optimizer: keras.Optimizer) -> bool:
    """Whether variables of an optimizer have moved since it was built."""
    known = optimizer._trainable_variables_indices
    return any(optimizer._var_key(one) not in known for one in optimizer._trainable_variables)


def _device_of(variable: Any) -> str:
    return (variable.value if isinstance(variable, keras.Variable) else variable).device


def _before_reduction(gradient: Any) -> Any:
    """A gradient as it was before the optimizer summed it over the one replica it knows of.

    That sum is an operation without effect, but one for all gradients, on one device.
    """
    if tf.executing_eagerly():
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = map(_source, (gradient.values, gradient.indices))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return _source(gradient)


def _source(tensor: Tensor) -> Tensor:
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
