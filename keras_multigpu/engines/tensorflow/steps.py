"""Hooks around Keras's loops and step functions on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.base import Runner, Steps, TrainedModel
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.cluster.watched import Watched
from keras_multigpu.engines.tensorflow.placing import drop_functions
from keras_multigpu.engines.tensorflow.runners import SliceRunner, running_whole


class TensorFlowSteps(Steps):
    """Turns off XLA for the outer step, drops stale traces, and watches other machines."""

    def __init__(self, model: TrainedModel, runner: Runner):
        self._model = model
        self._slices = isinstance(runner, SliceRunner)
        self._is_one_device = isinstance(runner, SliceRunner) and runner.is_one_device
        self._is_new = False  # the function of a training step is made, and not traced
        self._watched = Watched(model)
        self._traced_with: dict[int, tuple[keras.Variable, Any]] = {}

    def run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._watched.scope():
            return loop(*args, **kwargs)

    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._watched.scope():
            return step(*args, **kwargs)

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        self._drop_stale()
        if self._is_one_device:
            return make(force)
        before = getattr(self._model, name)
        # XLA compiles a cluster for one device: a compiled step would leave the others idle.
        # The replicas are compiled instead.
        with unchanged(self._model, "jit_compile", False):
            made = make(force)
        self._is_new = name == "train_function" and getattr(self._model, name) is not before
        return made

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def traced(*args: Any, **kwargs: Any) -> Any:
            is_new, self._is_new = self._is_new, False
            if not is_new or tf.executing_eagerly() or not self._lacks_slots():
                return step(*args, **kwargs)
            # TensorFlow drops a first trace that makes variables (slots, metrics), and traces
            # again. So it need not slice, and makes a variable even if the step makes none.
            try:
                with running_whole():
                    result = step(*args, **kwargs)
            except BaseException:
                self._model.train_function = None  # TensorFlow can't trace it a second time
                raise
            tf.Variable(0.0)
            return result

        return traced if self._slices and not self._is_one_device else step

    def _lacks_slots(self) -> bool:
        # `compile` may be the user's, and the optimizer whatever it is given.
        return not getattr(getattr(self._model, "optimizer", None), "built", True)

    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return variables

    def using_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._watched.weights()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with self._watched.weights():
            yield True

    def _drop_stale(self) -> None:
        """Drops functions that were traced with variables that have moved since.

        A layer may be built during `fit`; its variables are new, not moved.
        """
        before, model = self._traced_with, self._model
        now = {id(variable): (variable, variable._value) for variable in model.variables}
        self._traced_with = now
        if any(now[key][1] is not before[key][1] for key in now.keys() & before.keys()):
            drop_functions(model)
