"""Parallel models whose weights, and optimizer's slots, may be on different devices."""

from __future__ import annotations

from typing import Any

from keras_multigpu import engines
from keras_multigpu.modes.base import ParallelModel


class PlacedModel(ParallelModel):
    """Has the runner put the weights in their places when they are built, and before each step."""

    _parallel_runner: engines.PlacingRunner

    def _parallel_run_on(self, runner: engines.Runner) -> None:
        super()._parallel_run_on(runner)
        if engines.is_built(self.template):
            self._parallel_lay_out()
            self._parallel_place()

    def _parallel_lay_out(self) -> None:
        self._parallel_runner.lay_out()

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the template, and places its weights."""
        super().build(*args, **kwargs)
        self._parallel_lay_out()
        self._parallel_place()

    def _parallel_build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._parallel_build(args, kwargs)
        # Keep the step functions: the step that builds the template has used no variable before.
        names = ("train_function", "test_function", "predict_function")
        functions = {name: getattr(self, name) for name in names}
        self._parallel_lay_out()
        for name, function in functions.items():
            setattr(self, name, function)

    def _parallel_place(self) -> None:
        self._parallel_runner.place()

    def _parallel_make_step(self, name: str, make: Any, force: bool) -> Any:
        self._parallel_place()
        return super()._parallel_make_step(name, make, force)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Not in `compile`: Keras compiles a loaded model only if it does not override `compile`.
        if name == "optimizer" and value is not None:
            self._parallel_runner.place_updates(value)
