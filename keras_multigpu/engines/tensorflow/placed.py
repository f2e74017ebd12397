"""Tower and model mode on TensorFlow: Keras's steps, with parts on devices of their own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.building import built_in
from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.shared import check_alike, in_fresh_thread, unique, value_of
from keras_multigpu.engines.templates import all_layers, forget_losses
from keras_multigpu.engines.tensorflow.names import short_name
from keras_multigpu.engines.tensorflow.partition.told import eager_steps
from keras_multigpu.engines.tensorflow.places import Places
from keras_multigpu.engines.tensorflow.regions import compiled
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.tensorflow.weights.homes import make_whole
from keras_multigpu.engines.values import Call, Result


class Placed:
    """Runs steps whose parts are on devices.

    Args:
        devices: the device of each part.
        has_one_home: whether all weights are on the first device, so that eager steps are there.

    Attributes:
        places: the devices of the parts.
    """

    is_one_device = False

    def __init__(self, devices: Sequence[str], *, has_one_home: bool = False):
        self.places = Places(devices)
        self._home = short_name(devices[0]) if has_one_home else None
        self._is_told = not has_one_home or len(set(devices)) == 1  # of eager steps

    def step(
        self,
        model: TrainedModel,
        step: Callable[..., Any],
        name: str,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        together: None = None,
    ) -> Any:
        """A step of Keras's trainer, or of the user's class."""
        args, kwargs = call
        if tf.executing_eagerly():
            self._warn_of_eager_steps(model.name)
            return step(*args, **kwargs)
        return self._run(step, args, kwargs, bool(model.jit_compile))

    def _warn_of_eager_steps(self, name: str) -> None:
        if not self._is_told:
            assert self._home is not None
            self._is_told, are_all = True, tf.config.functions_run_eagerly()
            warnings.warn(eager_steps(name, self._home, are_all), stacklevel=2)

    def lay_out(self, model: TrainedModel) -> None:
        """Makes weights whole that another model of the template has in parts.

        Slots are made where they are kept: see `weights.placing.place_updates`.
        """
        in_fresh_thread(lambda: make_whole(model.template.weights, self.places.devices[0]))

    def function(self, step: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """A user's own step: see `ParallelModel.function`."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():  # as all functions do
                self._warn_of_eager_steps(getattr(step, "__name__", "step"))
                return step(*args, **kwargs)
            return self._run(step, args, kwargs, jit_compile, autograph=True)

        return tf.function(run, autograph=False, reduce_retracing=True)

    def _run(
        self, step: Any, args: Any, kwargs: Any, is_compiled: bool, autograph: bool = False
    ) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            return step(*args, **kwargs)

        if is_compiled:
            return compiled(run, (args, kwargs), self.places, autograph)
        with self.places.chosen():
            return (tf.function(run) if autograph else run)(args, kwargs)


class Replicas:
    """The replicas of a tower, each on its device.

    Those of one model run on the device of its weights if they run eagerly: the layers that Keras
    compiles take weights of their own device only.

    Args:
        models: the models that are called, or one model several times.
        places: the replicas' devices.
    """

    def __init__(self, models: Sequence[keras.Model], places: Places):
        self._models, self._places = tuple(models), places

    def run(self, call: Call) -> list[Result]:
        """Calls all replicas with the same arguments, without side effects."""
        counts = [len(model.variables) for model in self._models]
        check_alike([unique(model.variables) for model in self._models])
        with built_in(tf.init_scope, self._models):
            results = [self._call(number, call) for number in range(len(self._models))]
        # A call that builds layers is made again: in its scope, new variables are no variables yet.
        is_built = counts == [len(model.variables) for model in self._models]
        return results if is_built else self.run(call)

    def _call(self, number: int, call: Call) -> Result:
        args, kwargs = call
        model, is_own = self._models[number], self.have_own_weights
        metrics = dict(zip(map(id, self._metrics(model)), self._metrics(self._models[0])))
        values = [(one, value_of(one)) for one in unique(model.variables)]
        values += [(one, value_of(metrics[id(one)])) for one in self._metrics(model)]
        forget_losses(model)
        scope = ReplicaScope(values, number, is_own=is_own)
        with self._places.part(0 if tf.executing_eagerly() and not is_own else number), scope:
            outputs = model(*args, **kwargs)
            penalties = _penalties(model) if is_own else []
            assigned = [(one, scope.new_value(one)) for one in scope.assigned.values()]
        updates = [(metrics.get(id(one), one), value) for one, value in assigned]
        is_random = scope.draws_for(tensors_of(outputs))
        return Result(outputs, [*scope.losses, *penalties], updates, is_random)

    def _metrics(self, model: keras.Model) -> list[keras.Variable]:
        """The variables of the metrics in its layers: the first model's see all replicas."""
        layers = [one for one in all_layers(model) if not isinstance(one, keras.Model)]
        return unique([v for layer in layers for metric in layer.metrics for v in metric.variables])

    @property
    def have_own_weights(self) -> bool:
        """Whether each model is another one."""
        return len(self._models) > 1 and self._models[0] is not self._models[1]


def _penalties(model: keras.Model) -> list[Any]:
    regularized = [one for one in model.trainable_weights if one.regularizer is not None]
    return [variable.regularizer(variable.value) for variable in regularized]
