"""Keras's training on JAX, with batches and state on a parallel model's devices."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.joint import arguments, together, write_once, writing
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.jax.batches import Undivided, placed_batches
from keras_multigpu.engines.jax.checks import check_is_compiled, check_no_distribution
from keras_multigpu.engines.jax.cluster.compared import (
    Samples,
    compare_weights,
    listing_of,
    settings,
)
from keras_multigpu.engines.jax.cluster.joint import Step
from keras_multigpu.engines.jax.cluster.parts import own_rows
from keras_multigpu.engines.jax.cluster.readings import Readings
from keras_multigpu.engines.jax.cluster.spread_variables import arrays_of, lending
from keras_multigpu.engines.jax.counting.compiled import CompiledStep, compile_step, state_of
from keras_multigpu.engines.jax.lent import LentState
from keras_multigpu.engines.jax.placement import Placement, on_host, on_one_device, placement_on
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
        call: the latest call that several processes have made together.
        number: which of their models it is.
        lent: the state in the latest step.
    """

    traces_all = False

    def __init__(self, model: TrainedModel, runner: Runner):
        assert isinstance(runner, JaxRunner)
        self.model = model
        self.is_running = False
        self.call: Call | None = None
        self._runner: JaxRunner = runner
        self.lent = LentState(model)
        self._position = 0  # how many steps this pass over the data has had
        self._is_prepared = False  # whether what a loop's first call has made is spread
        group = runner.where.group
        self.number = None if group is None else next(group.models)
        self._readings = Readings(self, group) if group and runner.spreads_state else None
        self._samples, self._sample = Samples(), 0  # of the weights, on its way to other processes
        self._tables = WholeTables()
        weakref.finalize(model, runner.where.copies.clear)

    @property
    def where(self) -> Placement:
        """Where the batch and the state are during a step."""
        return self._runner.where

    @property
    def group(self) -> Group | None:
        """The processes that share the devices."""
        return self.where.group

    @property
    def settings(self) -> str:
        """Those of JAX that change what a step computes."""
        return settings()

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        check_no_distribution()
        if self._readings is not None:
            check_is_compiled(self.model)
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
        undivided, where, only_reads = Undivided(_LOOPS[name]), self.where, self._only_reads(name)
        lent, kind = self.lent, name.replace("function", "step")

        def next_step() -> Step:
            self._position += 1
            sample, self._sample = self._sample, 0
            return Step(kind, self._position - 1, sample, settings())

        def step(state: Any, iterator: Iterator[Any]) -> Any:
            one_short = self.is_running and name != "train_function"
            given, counts = self._resuming(iterator), list[list[int]]()
            batches = placed_batches(given, where, undivided, next_step, one_short, counts)
            self.lent.latest = state = arrays_of(state)
            with where.together():
                self._prepare()
                if self.call is not None:  # with other processes
                    self._sample = self._samples.take([*state[0], *state[1]], self.call)
                if only_reads:
                    outputs, state = read(function, state, batches, where)
                else:
                    assigned = lent.assigned(state) if self.group is not None else set()
                    state = where.put_state(state, assigned=assigned, paths=lent.paths, name=kind)
                    outputs, state = function(state, batches)
                outputs = where.outputs(outputs)
                where.finish((outputs, state))
                if name == "predict_function":
                    outputs = self._own_rows(outputs, counts)
            self.lent.latest = state
            if self.group is not None:
                self.lent.note(name, state)
            return outputs, state

        return step

    def _own_rows(self, outputs: Any, counts: list[list[int]]) -> Any:
        """The outputs of the rows that this process gave; all, if all give the same."""
        group = self.group
        if group is None or group.data == "same":
            return outputs
        return own_rows(outputs, counts, group.number)

    def _prepare(self) -> None:
        """Before a step: what is new in the state of several processes is spread, and compared."""
        if self._readings is None:
            return
        if not self._is_prepared:
            self._runner.spread(self._optimizer)
            self._is_prepared = True
        self._readings.compare_new()

    def _only_reads(self, name: str) -> bool:
        """Whether a step function reads the weights, and Keras calls it with one batch at a time.

        A function of the template's class, or Keras's own for several batches, may do anything with
        its state and batches. Several processes compare the weights whenever they are new on the
        devices, in every process.
        """
        model, maker = self.model, f"make_{name}"
        made_by = getattr(getattr(model.template, maker), "__func__", None)
        is_keras = made_by is getattr(keras.Model, maker) and model.steps_per_execution == 1
        return name != "train_function" and is_keras and self.where.group is None

    def begin_pass(self) -> None:
        self._position = 0

    def around(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        runner = self._runner
        look = functools.partial(self._look, name)
        spread_step = spread(runner.around(step), self.where, runner.spreads_state, look)
        return functools.wraps(step)(reading(spread_step, name))  # JAX's errors name the user's

    def _look(self, name: str, traced: Any, rows: int) -> None:
        """Notes what a step computes."""
        if not self.lent.latest:  # it does not run, but is compiled for a report
            return
        if self.group is not None:
            # With other sums in it the processes would wait for each other, or be aborted.
            self.group.compare("programs", listing_of(traced))
        elif name == "train_step" and rows and not self._runner.spreads_state:
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

    def reading_weights(self) -> contextlib.AbstractContextManager[None]:
        if self._readings is None:
            return self.using_weights()
        return self._readings.whole(slots=False, wanted=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with writing(self) as is_mine:
            if self._readings is None:
                yield is_mine
                return
            with self._readings.whole(slots=True, wanted=is_mine, is_compared=True):
                yield is_mine

    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._runner.spread(self._optimizer)
        if not self.is_running:
            self.begin_pass()
        self._is_prepared = False
        joint = together(self, "single steps", arguments(step, args, kwargs), is_loop=False)
        with joint, self.lent.returned(), self._lending():
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
            given = arguments(loop, args, kwargs)
            with together(self, loop.__name__, given), self.lent.returned(), self._lending():
                self._runner.spread(self._optimizer)
                self._is_prepared = False
                if self._readings is not None and self.call is not None:
                    self.call.take_part = self._readings.take_part
                args, kwargs = write_once(self, loop, args, kwargs)
                result = loop(*args, **kwargs)
                if self.group is not None and self.call is not None:
                    self.group.end(self.call)
                    if loop.__name__ == "fit":
                        self.compare_weights(self.group)
            return result
        finally:
            self.is_running, self.lent.latest = False, ()
            self._bring_home()

    def compare_weights(self, group: Group) -> None:
        """Raises a `ClusterError` if another process has other weights or slots.

        Of what is spread over the processes, only what was assigned is compared.
        """
        slots = self._optimizer.variables if self._optimizer is not None else []
        parts = Listing() if self._readings is None else self._readings.take_new()
        compare_weights(group, [*self.model.variables, *slots], parts)

    def compile_step(self, batch: Any, training: bool) -> CompiledStep:
        """Compiles a step as Keras does; it takes over the memory of a training step's state.

        `batch` holds inputs, targets and sample weights; without `training` it is a prediction.
        """
        model = self.model
        self._runner.spread(self._optimizer)
        with self._lending():
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

    def _lending(self) -> contextlib.AbstractContextManager[None]:
        if self._readings is None:
            return contextlib.nullcontext()
        return lending(self._readings.meet)

    def _resuming(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of a step, each of which goes on with this model's call."""
        for batch in iterator:
            if self.group is not None and self.call is not None:
                self.group.calls.resume(self.call)
            yield batch

    def _is_tied_elsewhere(self) -> bool:
        """Whether the template's own optimizer or metrics are tied to other devices.

        JAX would then refuse to use them together with the weights. Otherwise the weights stay on
        the devices between single steps, because moving them after each one is slow.
        """
        template = self.model.template
        own = metrics_variables(template)[:1]
        if getattr(template, "optimizer", None) is not None:
            own += template.optimizer.variables[:1]
        here = placement_on(self.model.devices).replicated.device_set
        return any(one.value.committed and one.value.sharding.device_set != here for one in own)

    def _bring_home(self) -> None:
        self.lent.forget_weights()
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
