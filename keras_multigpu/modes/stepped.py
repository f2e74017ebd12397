"""The steps of a parallel model: what Keras runs and what it sees, through the engine's `Steps`."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.modes.forgotten import check_compiled, check_controls, controls, note_use
from keras_multigpu.modes.one_model import KERAS_STEPS, computing
from keras_multigpu.modes.saving import SavedModel
from keras_multigpu.progress import with_first_told


class SteppedModel(SavedModel):
    """A model whose steps a backend's engine makes, on several devices."""

    mode: str
    _parallel_runner: Any
    _parallel_loops = 0  # that run, one within the other
    _parallel_compilation: Any = None  # when it was compiled like its template
    _parallel_undone: str | None = None  # the option that has made it uncompiled

    def __init__(self, template: keras.Model, devices: Sequence[str]):
        super().__init__(template)
        self._parallel_devices = tuple(devices)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices in use."""
        return self._parallel_devices

    def _parallel_place(self) -> None:
        """Moves the weights back to this model's devices."""
        self._parallel_runner.place()

    def _parallel_retrace(self) -> None:
        """Drops what was planned: the template may have changed."""

    def _parallel_method(self, name: str) -> Any:
        bound = super()._parallel_method(name)
        is_step = name in KERAS_STEPS
        if not is_step and name != "stateless_call":
            return bound
        if is_step:
            bound = self._parallel_steps.around(bound, name)

        @functools.wraps(bound)
        def step(*args: Any, **kwargs: Any) -> Any:
            within = self._parallel_in_step() if is_step else contextlib.nullcontext()
            with computing(self), within:  # the template has this model's optimizer
                return bound(*args, **kwargs)

        return step

    def _parallel_in_step(self) -> contextlib.AbstractContextManager[None]:
        """The mode's scope around `train_step`, `test_step` and `predict_step`."""
        return contextlib.nullcontext()

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of a training step, as Keras does."""
        return self._parallel_make_step("train_function", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function of an evaluation step, as Keras does."""
        return self._parallel_make_step("test_function", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function of a prediction step, as Keras does."""
        return self._parallel_make_step("predict_function", super().make_predict_function, force)

    def _parallel_make_step(self, name: str, make: Any, force: bool) -> Any:
        self._parallel_place()
        before = getattr(self, name)
        if before is None or force:
            self._parallel_retrace()
        made = self._parallel_steps.make(name, make, force)
        function = getattr(self, name)
        is_new = function is not before and function is not None
        # Not an evaluation within a `fit`, which shows its bar.
        is_within = name == "test_function" and self._parallel_loops > 1
        is_traced = not self.run_eagerly and (self.jit_compile or self._parallel_steps.traces_all)
        if is_new and is_traced and not is_within and len(self.devices) > 1:
            how = "traced and compiled" if self.jit_compile else "traced"
            text = (
                f"keras_multigpu: {self.name!r} is {how} for {len(self.devices)} devices. A large "
                "model takes minutes, in the first step only."
            )
            setattr(self, name, with_first_told(function, text))
        return made

    def _parallel_run_loop(self, loop: Any, args: Any, kwargs: Any) -> Any:
        self._parallel_begin(loop.__name__)
        is_nested = self._parallel_loops > 0
        self._parallel_loops += 1
        before = controls(self.template)
        try:
            result = self._parallel_steps.run_loop(loop, args, kwargs)
        finally:
            self._parallel_loops -= 1
        if not is_nested:
            if loop.__name__ == "fit":
                check_controls(self, before)
            self._parallel_end(loop.__name__)
        return result

    def reset_metrics(self) -> None:
        """Resets the metrics, as Keras does when an epoch or an evaluation begins."""
        if self._parallel_steps is not None:  # the model is made
            self._parallel_steps.begin_pass()
        super().reset_metrics()

    def _parallel_run_batch(self, step: Any, args: Any, kwargs: Any) -> Any:
        self._parallel_begin(step.__name__)
        return self._parallel_steps.run_batch(step, args, kwargs)

    def _parallel_begin(self, method: str) -> None:
        note_use(self)
        if not method.startswith("predict"):
            check_compiled(self, method)

    def _parallel_end(self, method: str) -> None:
        """After a loop of Keras's: a mode may have something to tell."""

    def _parallel_seen(self, name: str) -> list[keras.Variable]:
        """The variables that Keras lists under a name, as a step sees them."""
        variables = getattr(super(), name)
        steps = self._parallel_steps  # `None` while the model is being made
        return variables if steps is None else steps.seen(variables)


def _through(name: str, run: str) -> Any:
    """A method of Keras's models, run by another method of this class."""

    @functools.wraps(getattr(keras.Model, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, run)(getattr(super(SteppedModel, self), name), args, kwargs)

    return method


for _name in ("fit", "evaluate", "predict"):
    setattr(SteppedModel, _name, _through(_name, "_parallel_run_loop"))
for _name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
    setattr(SteppedModel, _name, _through(_name, "_parallel_run_batch"))
for _name in ("trainable_variables", "trainable_weights", "non_trainable_variables"):
    setattr(SteppedModel, _name, property(operator.methodcaller("_parallel_seen", _name)))
