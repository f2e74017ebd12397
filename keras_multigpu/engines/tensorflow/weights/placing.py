"""Moves variables between devices, and makes optimizers update each where it is stored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.optimizers import claim, clip_by, inner_optimizers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.weights.divided import (
    DividedVariable,
    acting_as,
    division_of,
    on_device,
    shown_on,
)
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.tensorflow.weights.lookups import split_rows
from keras_multigpu.engines.values import Tensor

# The slots of divided variables, by TensorFlow's id of the variable.
_SLOTS: weakref.WeakKeyDictionary[keras.Optimizer, dict[str, list[keras.Variable]]]
_SLOTS = weakref.WeakKeyDictionary()
# Optimizers that compute each element of a weight and its slots by itself.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def place_updates(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer create and update a variable's slots on the variable's device.

    Unpatched, it keeps all slots on the first device, and sends gradients and weights there. The
    slots of a divided variable are divided with it; its parts are updated by themselves if the
    optimizer's mathematics allow it.
    """
    if "update_step" in vars(optimizer):
        if optimizer.built:
            _move_slots(optimizer)
        return  # placed already
    for inner in inner_optimizers(optimizer):
        place_updates(inner)
    if hasattr(optimizer, "optimizers"):
        _place_inner(optimizer)
    if optimizer.built:
        _move_slots(optimizer)
    make_slot, update = optimizer.add_variable_from_reference, optimizer.update_step

    def make_slot_there(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        division = division_of(reference_variable)
        if division is None:
            with tf.device(_device_of(reference_variable)):
                return make_slot(reference_variable, *args, **kwargs)
        with tf.init_scope(), shown_on(full_name("cpu:0")):
            slot = make_slot(reference_variable, *args, **kwargs)
        move_variable(slot, division)
        _slots_of(optimizer, reference_variable).append(slot)
        return slot

    def update_there(gradient: Any, variable: Any, *args: Any) -> None:
        gradient, division = _before_reduction(gradient), division_of(variable)
        if division is None or not _is_by_parts(optimizer, variable, division):
            with tf.device(_device_of(variable)):
                return update(gradient, variable, *args)
        for number, part in enumerate(_parts_of_gradient(gradient, division)):
            with acting_as(division, number), on_device(division.devices[number]):
                update(part, variable, *args)

    optimizer.add_variable_from_reference = make_slot_there
    optimizer.update_step = update_there
    if type(optimizer) in _ELEMENTWISE:
        optimizer._apply_weight_decay = _by_parts(optimizer._apply_weight_decay)


def _slots_of(optimizer: keras.Optimizer, variable: Any) -> list[keras.Variable]:
    """The slots of a divided variable, as far as they have its shape."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return _SLOTS.setdefault(optimizer, {}).setdefault(value._unique_id, [])


def _is_by_parts(optimizer: keras.Optimizer, variable: Any, division: Division) -> bool:
    """Whether an optimizer can update the parts of a divided variable by themselves."""
    if type(optimizer) not in _ELEMENTWISE:
        return False
    slots = _slots_of(optimizer, variable)
    if not slots:  # it has none, or they are not known
        return all(tuple(slot.shape) != division.shape for slot in optimizer.variables)
    return all(division_of(slot) == division for slot in slots)


def _by_parts(apply_to: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Has a function of a list of variables change the parts of divided ones by themselves."""

    def apply_by_parts(variables: list[Any]) -> None:
        apply_to([one for one in variables if division_of(one) is None])
        for variable in variables:
            division = division_of(variable)
            if division is None:
                continue
            for number, device in enumerate(division.devices):
                with acting_as(division, number), on_device(device):
                    apply_to([variable])

    return apply_by_parts


def _place_inner(optimizer: keras.Optimizer) -> None:
    """Makes a `MultiOptimizer` place the updates of optimizers that its `build` creates."""
    build = optimizer.build

    def build_there(variables: list[keras.Variable]) -> None:
        with tf.init_scope():  # outside of functions Keras puts slots on their variables' devices
            build(variables)
        for inner in inner_optimizers(optimizer):
            place_updates(inner)

    optimizer.build = build_there


def _move_slots(optimizer: keras.Optimizer) -> None:
    """Moves slots that were made before to the devices of their variables.

    Keras names a slot after its variable, and keeps no other trace of it.
    """
    known = sorted(optimizer._trainable_variables, key=lambda one: len(one.path), reverse=True)
    taken = set()  # of weights with the same path, each has its own slots
    _SLOTS.pop(optimizer, None)
    for slot in optimizer.variables:
        for variable in known:
            is_named = slot.name.startswith(f"{variable.path.replace('/', '_')}_")
            is_free = (id(variable), slot.name) not in taken
            if is_named and is_free and slot.shape == variable.shape:
                taken.add((id(variable), slot.name))
                move_variable(slot, division_of(variable) or _device_of(variable))
                _slots_of(optimizer, variable).append(slot)
                break


def clip_by_member(optimizer: keras.Optimizer, models: Sequence[keras.Model]) -> None:
    """Makes an optimizer clip the gradients of each committee member separately."""
    if not claim(optimizer, ("clips by member", *map(id, models))):
        return
    original, build = optimizer._clip_gradients, optimizer.build

    def clip(gradients: Sequence[Tensor], variables: Sequence[keras.Variable]) -> list[Tensor]:
        clipped = list(gradients)
        owners = {id(one): number for number, model in enumerate(models) for one in model.variables}
        for number in (*range(len(models)), None):  # the last ones are of no member
            places = [i for i, one in enumerate(variables) if owners.get(id(one)) == number]
            if places:
                with tf.device(_device_of(variables[places[0]])):
                    parts = original([gradients[place] for place in places])
                for place, part in zip(places, parts):
                    clipped[place] = part
        return clipped

    def build_all(variables: Sequence[keras.Variable]) -> None:
        build(variables)
        for inner in inner_optimizers(optimizer):  # `build` creates some of them
            clip_by_member(inner, models)

    clip_by(optimizer, clip)
    optimizer.build = build_all
    for inner in inner_optimizers(optimizer):
        clip_by_member(inner, models)


def move_variable(variable: keras.Variable, home: str | Division) -> bool:
    """Moves a variable's value to a device, or its parts to several; whether it was elsewhere.

    TensorFlow can't move a variable, so Keras's variable gets a new `tf.Variable`. Optimizers know
    variables by TensorFlow's id, which the new one takes over. The old one is destroyed: functions
    traced with it fail, instead of using stale values.
    """
    old, before = variable._value, division_of(variable)
    if isinstance(home, Division):
        if before == home:
            return False
        with tf.init_scope():
            variable._value = DividedVariable(old.numpy(), home, old)
    elif before is None and old.device == full_name(home):
        return False
    else:
        with tf.init_scope(), tf.device(full_name(home)):
            variable._value = tf.Variable(
                old.read_value() if before is None else old.numpy(),
                trainable=old.trainable,
                name=variable.name,
                dtype=old.dtype,
                synchronization=old.synchronization,
                aggregation=old.aggregation,
            )
            variable._value._unique_id = old._unique_id
    with tf.init_scope():
        for one in [old] if before is None else [old.link, *old.parts]:
            tf.raw_ops.DestroyResourceOp(resource=one.handle, ignore_lookup_error=True)
    return True


def move_variables(
    homes: Sequence[tuple[keras.Variable, str | Division]], model: keras.Model
) -> None:
    """Moves each variable to the home beside it; drops what their model traced before."""
    moved = [move_variable(variable, home) for variable, home in homes]
    if any(moved):
        drop_functions(model)


def drop_functions(model: Any) -> None:
    """Drops the step functions that a model has traced."""
    model.train_function = model.test_function = model.predict_function = None


def _device_of(variable: Any) -> str:
    return (variable.value if isinstance(variable, keras.Variable) else variable).device


def _before_reduction(gradient: Any) -> Any:
    """A gradient before the optimizer's sum over its single replica.

    That sum has no effect, but it is one operation for all gradients, on one device.
    """
    if tf.executing_eagerly():
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = map(_source, (gradient.values, gradient.indices))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return _source(gradient)


def _source(tensor: Tensor, kinds: Sequence[str] = ("IdentityN",)) -> Tensor:
    """What a tensor is the same as, before operations of some kinds."""
    while tensor.op.type in kinds:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _parts_of_gradient(gradient: Any, division: Division) -> list[Any]:
    """The parts of a gradient: those that it was just joined of, if it was."""
    if tf.executing_eagerly():
        return division.split(gradient)
    if isinstance(gradient, tf.IndexedSlices):
        flat = (gradient.values, gradient.indices)
        values, rows = (_source(one, ("Identity", "IdentityN")) for one in flat)
        joined_rows = tf.IndexedSlices(values, rows, gradient.dense_shape)
        found = None if division.axis else split_rows(joined_rows, division)
        if found is not None:
            return found
    else:
        joined = _source(tf.convert_to_tensor(gradient), ("Identity", "IdentityN")).op
        if joined.type == "ConcatV2" and tf.get_static_value(joined.inputs[-1]) == division.axis:
            parts = list(joined.inputs[:-1])
            sizes = tuple(part.shape[division.axis] for part in parts)
            if sizes == division.sizes:
                return parts
    return division.split(gradient)
