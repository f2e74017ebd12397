"""Keras's training on JAX, with batches and state on a parallel model's devices."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_multigpu.engines.jax.batches import Undivided, placed_batches
from keras_multigpu.engines.jax.checks import check_no_distribution
from keras_multigpu.engines.jax.cluster.joint import Step
from keras_multigpu.engines.jax.cluster.spread_variables import arrays_of
from keras_multigpu.engines.jax.counting.compiled import CompiledStep, compile_step, state_of
from keras_multigpu.engines.jax.lent import LentState
from keras_multigpu.engines.jax.placement import Placement, on_host, on_one_device
from keras_multigpu.engines.jax.pure import JaxRunner
from keras_multigpu.engines.jax.reading import read, reading
from keras_multigpu.engines.jax.spreading import spread
from keras_multigpu.engines.jax.state.parted import is_spread
from keras_multigpu.engines.jax.tables import WholeTables
from keras_multigpu.engines.runners import Runner, Steps, TrainedModel
from keras_multigpu.engines.templates import metrics_variables

_LOOPS = {
    "train_function": "the training",
    "test_function": "the evaluation",
    "predict_function": "the prediction",
}


class JaxSteps(Steps):
    """Puts the state and the batches of Keras's step functions on the devices.

    Each device gets its rows of the batch and a copy of the state; the compiler does the rest.
    After a loop the weights that it changed return to the default device, so that the template can
    be used alone, or in a parallel model on other devices.

    Attributes:
        is_running: whether a loop is running.
        where: where the batch and the state are during a step.
        lent: the state in the latest step.
    """

    traces_all = False

    def __init__(self, model: TrainedModel, runner: Runner):
        assert isinstance(runner, JaxRunner)
        self.model = model
        self.is_running = False
        self._runner: JaxRunner = runner
        self.where: Placement = runner.where
        self.lent = LentState(model)
        self._position = 0  # how many steps this pass over the data has had
        self._tables = WholeTables()
        weakref.finalize(model, runner.where.copies.clear)

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        check_no_distribution()
        before = getattr(self.model, name)
        made = make(force)
        function = getattr(self.model, name)
        if function is not before:
            setattr(self.model, name, self.placed(function, name))
        return made

    def placed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Keras's step function (`"train_function"`), with state and batches put on the devices.

        Of a function that only reads the weights, those that it does not change stay where they
        are.
        """
        undivided, only_reads = Undivided(_LOOPS[name]), self._only_reads(name)
        begin = functools.partial(self.begin_step, name.replace("function", "step"))

        def step(state: Any, iterator: Iterator[Any]) -> Any:
            one_short, counts = self.is_running and name != "train_function", list[list[int]]()
            batches = placed_batches(iterator, self.where, undivided, begin, one_short, counts)
            self.lent.latest = state = arrays_of(state)
            outputs, state = self.run_step(name, function, state, batches, only_reads)
            self.lent.latest = state
            return self.own_outputs(name, outputs, counts), state

        return step

    def begin_step(self, kind: str) -> Step:
        """What is known of the step (`"train_step"`) that gets the next batch."""
        self._position += 1
        return Step(kind, self._position - 1)

    def run_step(
        self,
        name: str,
        function: Callable[..., Any],
        state: Any,
        batches: Iterator[Any],
        only_reads: bool,
    ) -> tuple[Any, Any]:
        """Calls Keras's function of a step; gives its outputs, and the new state."""
        if only_reads:
            return read(function, state, batches, self.where)
        return function(self.where.put_state(state), batches)

    def own_outputs(self, name: str, outputs: Any, counts: list[list[int]]) -> Any:
        """The outputs of the rows that this process gave, of so many of each."""
        return outputs

    def _only_reads(self, name: str) -> bool:
        """Whether a step function reads the weights, and Keras calls it with one batch at a time.

        A function of the template's class, or Keras's own for several batches, may do anything with
        its state and batches.
        """
        model, maker = self.model, f"make_{name}"
        made_by = getattr(getattr(model.template, maker), "__func__", None)
        is_keras = made_by is getattr(keras.Model, maker) and model.steps_per_execution == 1
        return name != "train_function" and is_keras

    def begin_pass(self) -> None:
        self._position = 0

    def around(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        runner = self._runner
        look = functools.partial(self._look, name)
        spread_step = spread(runner.around(step), self.where, runner.spreads_state, look)
        return functools.wraps(step)(reading(spread_step, name))  # JAX's errors name the user's

    def _look(self, name: str, traced: Any, rows: int) -> None:
        """Notes what a step computes."""
        # Without a state it does not run, but is compiled for a report.
        if self.lent.latest and name == "train_step" and rows and not self._runner.spreads_state:
            self._tables.look(traced.jaxpr, self.model.trainable_variables, self.where.count, rows)

    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return self._runner.seen(variables)

    @contextlib.contextmanager
    def using_weights(self) -> Iterator[None]:
        if not self._runner.spreads_state:
            yield
            return
        # New values are in the host's memory until they are spread, so that no device needs room
        # for all of them.
        before = {id(variable): variable._value for variable in self.model.variables}
        with on_host():
            yield
        self._runner.spread(self._optimizer)
        for variable in self.model.variables:
            is_new = variable._value is not before.get(id(variable))
            if is_new and not is_spread(variable):
                variable.assign(on_one_device(variable._value))
        self._runner.rest(self._optimizer)

    def writing(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)

    def joined(
        self, call: Callable[..., Any], args: Any, kwargs: Any, *, is_loop: bool
    ) -> contextlib.AbstractContextManager[tuple[Any, Any]]:
        """Scope of a loop, or of a single step; gives the arguments to call it with."""
        return contextlib.nullcontext((args, kwargs))

    def lending(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which steps take the values of variables."""
        return contextlib.nullcontext()

    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._runner.spread(self._optimizer)
        if not self.is_running:
            self.begin_pass()
        joined = self.joined(step, args, kwargs, is_loop=False)
        with joined as (args, kwargs), self.lent.returned(), self.lending():
            result = step(*args, **kwargs)
        self.lent.latest = ()
        self._runner.rest(self._optimizer)
        if self._is_tied_elsewhere():
            self._bring_home()
        return result

    def run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_running:
            return loop(*args, **kwargs)  # a nested loop: the evaluation within `fit`, say
        check_no_distribution()
        self.is_running = True
        self.begin_pass()
        try:
            joined = self.joined(loop, args, kwargs, is_loop=True)
            with joined as (args, kwargs), self.lent.returned(), self.lending():
                self._runner.spread(self._optimizer)
                return loop(*args, **kwargs)
        finally:
            self.is_running, self.lent.latest = False, ()
            self._bring_home()

    def compile_step(self, batch: Any, training: bool) -> CompiledStep:
        """Compiles a step as Keras does; it takes over the memory of a training step's state.

        `batch` holds inputs, targets and sample weights; without `training` it is a prediction.
        """
        model = self.model
        self._runner.spread(self._optimizer)
        with self.lending():
            state = self.where.put_state(arrays_of(state_of(model, training)))
        self._runner.rest(self._optimizer)
        data = keras.utils.pack_x_y_sample_weight(*batch) if training else batch[:1]
        step = model.train_step if training else model.predict_step
        with self.where.as_on_gpus():
            data = self.where.put_batch(data, self.where.compare(data, Step()))
            return compile_step(step, state, data, training)

    @property
    def _optimizer(self) -> Any:
        return getattr(self.model, "optimizer", None)

    def _is_tied_elsewhere(self) -> bool:
        """Whether the template's own optimizer or metrics are tied to other devices.

        JAX would then refuse to use them together with the weights. Otherwise the weights stay on
        the devices between single steps, because moving them after each one is slow.
        """
        template = self.model.template
        own = metrics_variables(template)[:1]
        if getattr(template, "optimizer", None) is not None:
            own += template.optimizer.variables[:1]
        here = self.where.replicated.device_set
        return any(one.value.committed and one.value.sharding.device_set != here for one in own)

    def _bring_home(self) -> None:
        self._runner.rest(self._optimizer)
        variables = self.model.variables
        kept = self._runner.kept(variables, self._optimizer)
        for variable in variables:
            # A value is missing if the step failed after it had donated the memory to XLA.
            value = variable._value if id(variable) not in kept else None
            if value is None or value.is_deleted() or not value.committed:
                continue
            if self.where.can_read(value):
                variable.assign(on_one_device(self.where.outputs(value)))
