"""Tower and model mode on TensorFlow: Keras's steps, with parts on devices of their own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.names import short_name
from keras_multigpu.engines.tensorflow.partition.told import COMPILED_AROUND, eager_steps
from keras_multigpu.engines.tensorflow.partition.traced import is_one_device
from keras_multigpu.engines.tensorflow.places import Places
from keras_multigpu.engines.tensorflow.regions import compiled
from keras_multigpu.engines.tensorflow.tensors import is_compiled_around
from keras_multigpu.engines.tensorflow.weights.homes import make_whole


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

    def warn_if_compiled_around(self, name: str) -> None:
        """Warns if XLA compiles the graph in which a model is called: for one device.

        Not if it is a step of `regions`, which is traced as for XLA and then compiled in parts.
        """
        if self._home is None or tf.executing_eagerly() or is_one_device():
            return
        if is_compiled_around():
            text = f"{name!r} runs on {self._home!r} alone: {COMPILED_AROUND}."
            warnings.warn(text, stacklevel=2)

    def lay_out(self, model: TrainedModel) -> None:
        """Makes weights whole that another model of the template has in parts.

        Slots are made where they are kept: see `weights.placing.place_updates`.
        """
        in_fresh_thread(lambda: make_whole(model.template.weights, self.places.devices[0]))

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        """A user's own step: see `ParallelModel.function`."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():  # as all functions do
                self._warn_of_eager_steps(getattr(step, "__name__", "step"))
                return step(*args, **kwargs)
            return self._run(step, args, kwargs, bool(jit_compile), autograph=True)

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
