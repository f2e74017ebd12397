"""Moves variables between devices, and makes optimizers update each where it is stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.optimizers import claim, clip_by, inner_optimizers, slots_of
from keras_multigpu.engines.runners import Runner
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.weights.divided import DividedVariable, division_of, parts_of
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.tensorflow.weights.rows import add_equal_rows
from keras_multigpu.engines.values import Tensor


def place_updates(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer create and update a variable's slots on the variable's device.

    Unpatched, it keeps all slots on the first device, and sends gradients and weights there.
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
        with tf.device(_device_of(reference_variable)):
            return make_slot(reference_variable, *args, **kwargs)

    def update_there(gradient: Any, variable: Any, *args: Any) -> None:
        with tf.device(_device_of(variable)):
            update(_before_reduction(gradient), variable, *args)

    optimizer.add_variable_from_reference = make_slot_there
    optimizer.update_step = update_there


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
    """Moves slots that were made before to the devices of their variables."""
    for slot, variable in slots_of(optimizer):
        move_variable(slot, _device_of(variable))


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


def add_uses(optimizer: keras.Optimizer, count: int) -> None:
    """Makes an optimizer add up what several replicas of one batch give to a table's rows.

    Optimizers square the rows of a sparse gradient one by one, also those of the same name.
    """
    if not isinstance(optimizer, keras.Optimizer) or not claim(optimizer, ("adds uses", count)):
        return
    original = optimizer._clip_gradients

    def clip(gradients: Sequence[Tensor], variables: Sequence[keras.Variable]) -> list[Tensor]:
        return original([add_equal_rows(one, count) for one in gradients])

    clip_by(optimizer, clip)
    for inner in inner_optimizers(optimizer):
        add_uses(inner, count)


def move_variable(variable: keras.Variable, home: str | Division) -> bool:
    """Moves a variable's value to a device, or its parts to several; whether it was elsewhere.

    TensorFlow can't move a variable, so Keras's variable gets a new `tf.Variable`. Optimizers know
    variables by TensorFlow's id, which the new one takes over. The old one is left empty: functions
    traced with it fail, instead of using stale values.
    """
    old, before, stored = variable._value, division_of(variable), parts_of(variable)
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
    for one in stored:
        with tf.init_scope(), tf.device(one.device):
            none = tf.zeros([0], one.dtype)
            tf.raw_ops.AssignVariableOp(resource=one.handle, value=none, validate_shape=False)
    return True


def leave_to_one_device(template: keras.Model) -> None:
    """Lets a template run by itself wherever its weights are.

    XLA compiles for one device, and finds no weights on others.
    """
    homes = {division_of(one) or one._value.device for one in template.variables}
    if len(homes) > 1 or any(isinstance(one, Division) for one in homes):
        template.jit_compile = False


class Moves:
    """Tells whether variables have moved since something was traced with them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[keras.Variable, Any]] = {}

    def note(self, variables: Iterable[keras.Variable]) -> None:
        """Notes where variables are that it has not seen before."""
        for one in variables:
            self._known.setdefault(id(one), (one, one._value))

    def found(self, variables: Iterable[keras.Variable]) -> bool:
        """Whether one of them has moved since it was noted; notes where they are now."""
        before, now = self._known, {id(one): (one, one._value) for one in variables}
        self._known = now
        return any(now[key][1] is not before[key][1] for key in now.keys() & before.keys())


class FollowingRunner(Runner):
    """A runner whose `partition` makes functions of steps, again when variables have moved.

    Attributes:
        models: those whose variables they use.
    """

    partition: Any
    models: Sequence[keras.Model]

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        moves, make = Moves(), functools.partial(self.partition.function, step, jit_compile, rows)
        made = make()

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if moves.found(one for model in self.models for one in model.variables):
                made = make()
            return made(*args, **kwargs)

        return run


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


def _source(tensor: Tensor) -> Tensor:
    """What a tensor is the same as, before it was passed on with others."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
