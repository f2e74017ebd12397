"""Hooks around Keras's loops and step functions on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_multigpu.engines.runners import Runner, Steps, TrainedModel
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.batch_rows import BatchRows
from keras_multigpu.engines.tensorflow.checks import check_no_strategy
from keras_multigpu.engines.tensorflow.ends import begins_late, found_before
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.placed import Placed
from keras_multigpu.engines.tensorflow.runners import CommitteeRunner, PartitionRunner
from keras_multigpu.engines.tensorflow.stages import StageRunner
from keras_multigpu.engines.tensorflow.watched import Watched
from keras_multigpu.engines.tensorflow.weights.placing import (
    Moves,
    drop_functions,
    leave_to_one_device,
)
from keras_multigpu.engines.tensorflow.wide import WideRunner


class TensorFlowSteps(Steps):
    """Turns off XLA for the outer step, drops stale traces, and watches other machines."""

    def __init__(self, model: TrainedModel, runner: Runner):
        self.model = model
        assert isinstance(runner, (PartitionRunner, CommitteeRunner, StageRunner, WideRunner))
        self._partition: Partition | Placed = runner.partition
        self._watched = Watched(model)
        self._moves = Moves()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Scope of steps, which tells what fails in them."""
        with contextlib.ExitStack() as scopes:
            if isinstance(self._partition, Partition):
                scopes.enter_context(self._partition.notices.errors_told_once())
            scopes.enter_context(self._watched.scope())
            yield

    def run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._running():
            return self._run_loop(loop, args, kwargs)

    def _run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not isinstance(self._partition, Partition):
            return loop(*args, **kwargs)
        with self._partition.rows.of_loop(loop, args, kwargs):
            return loop(*args, **kwargs)

    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._running():
            return self._run_batch(step, args, kwargs)

    def _run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return step(*args, **kwargs)

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        self._partition.lay_out(self.model)
        # Functions that were traced with variables that have moved since are stale.
        if self._moves.found(self._variables()):
            self._remake_functions(name)
        check_no_strategy(self.model)
        if isinstance(self._partition, Partition):
            is_planned = getattr(self.model, name) is not None and not force
            if self._partition.rows.expect(name.partition("_")[0], is_planned):
                setattr(self.model, name, None)
        if self._partition.is_one_device:
            leave_to_one_device(self.model)  # another model of the template may spread its weights
            return make(force)
        before = getattr(self.model, name)
        # XLA compiles a cluster for one device: a compiled step would leave the others idle.
        # What each device computes is compiled instead.
        with unchanged(self.model, "jit_compile", False):
            made = make(force)
        function = getattr(self.model, name)
        if function is not before:
            self._wrap(name, function)
        return made

    def _wrap(self, name: str, function: Callable[..., Any]) -> None:
        """Puts what is needed around a step function that Keras has made."""
        if begins_late(self.model, name):
            function = found_before(function)
            setattr(self.model, name, function)
        if name == "train_function" and isinstance(self._partition, Partition):
            self._notice(function, self._partition.rows)

    def _notice(self, function: Callable[..., Any], rows: BatchRows) -> None:
        """Has a training function warn of few rows in its first steps, and then put back."""

        def put_back() -> None:
            if self.model.train_function is noticed:
                self.model.train_function = function

        noticed = self.model.train_function = rows.told_by(function, put_back)

    def _remake_functions(self, name: str) -> None:
        """Drops the step functions, and makes those again that a loop around this may be using.

        Such as `fit` around an evaluation, for which the function `name` is being made.
        """
        others = [f"{kind}_function" for kind in ("train", "test", "predict")]
        used = [one for one in others if one != name and getattr(self.model, one) is not None]
        drop_functions(self.model)
        for one in used:
            getattr(self.model, f"make_{one}")()

    def around(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        if self._partition.is_one_device:
            return step

        @functools.wraps(step)
        def on_all(*args: Any, **kwargs: Any) -> Any:
            result = self._step(step, name, args, kwargs)
            # They may be built in the step, and be moved before the next loop.
            self._moves.note(self._variables())
            return result

        return on_all

    def _step(self, step: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        return self._partition.step(self.model, step, name, (args, kwargs))

    def begin_pass(self) -> None:
        pass

    def using_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._watched.weights()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with self._watched.weights():
            yield True

    def _variables(self) -> list[keras.Variable]:
        """The weights, the other state, and the optimizer's."""
        optimizer = getattr(self.model, "optimizer", None)
        slots = optimizer.variables if isinstance(optimizer, keras.Optimizer) else []
        return [*self.model.variables, *slots]
