"""Hooks around Keras's loops and step functions on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.cluster import joint
from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.joint import arguments, together, write_once
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.runners import Runner, Steps, TrainedModel
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.batch_rows import BatchRows
from keras_multigpu.engines.tensorflow.checks import check_no_strategy
from keras_multigpu.engines.tensorflow.cluster import processes
from keras_multigpu.engines.tensorflow.cluster.processes import Group
from keras_multigpu.engines.tensorflow.cluster.samples import Samples
from keras_multigpu.engines.tensorflow.ends import begins_late, found_before
from keras_multigpu.engines.tensorflow.partition.together import Together
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.placed import Placed
from keras_multigpu.engines.tensorflow.runners import CommitteeRunner, PartitionRunner
from keras_multigpu.engines.tensorflow.stages import StageRunner
from keras_multigpu.engines.tensorflow.watched import Watched
from keras_multigpu.engines.tensorflow.weights.divided import is_here
from keras_multigpu.engines.tensorflow.weights.placing import (
    Moves,
    drop_functions,
    leave_to_one_device,
)
from keras_multigpu.engines.tensorflow.wide import WideRunner


class TensorFlowSteps(Steps):
    """Turns off XLA for the outer step, drops stale traces, and watches other machines."""

    def __init__(self, model: TrainedModel, runner: Runner):
        self.model = self._model = model
        self.is_running = False
        self.call: Call | None = None  # with other processes
        self._peers = runner.peers if isinstance(runner, PartitionRunner) else None
        group = self.group  # the model is one of those that all processes make
        self.number = None if group is None else next(group.models)
        self._batches = runner.batches if isinstance(runner, PartitionRunner) else None
        self._samples = Samples(model, is_here)
        self._start = 0  # how many batches had come when this pass over the data began
        self._compared: Call | None = None  # where the processes have compared the weights
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
            if self.group is None:
                if not isinstance(self._partition, Partition):
                    return loop(*args, **kwargs)
                with self._partition.rows.of_loop(loop, args, kwargs):
                    return loop(*args, **kwargs)
            if self.is_running:  # a nested loop: evaluation within `fit`
                with self._rows_compared():
                    return loop(*args, **kwargs)
            return self._run_together(loop, args, kwargs)

    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._running():
            if self.group is None:
                return step(*args, **kwargs)
            if self.is_running:
                with self._rows_compared():
                    return step(*args, **kwargs)
            with (
                together(self, "single steps", arguments(step, args, kwargs), is_loop=False),
                self.group.watching(),
                self._rows_compared(),
            ):
                return step(*args, **kwargs)

    def _run_together(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a loop together with the other processes."""
        assert self.group is not None
        told = together(self, loop.__name__, arguments(loop, args, kwargs))
        with unchanged(self, "is_running", True), told:
            args, kwargs = write_once(self, loop, args, kwargs)
            with self.group.watching(), self._rows_compared():
                result = loop(*args, **kwargs)
            assert self.call is not None
            self.group.end(self.call)
            if loop.__name__ == "fit":
                self.compare_weights(self.group)
        return result

    @property
    def group(self) -> Group | None:
        """The processes that share the model's devices."""
        return None if self._peers is None else processes.current()

    @property
    def settings(self) -> str:
        """Those of TensorFlow that change what a step computes."""
        run_eagerly = tf.config.functions_run_eagerly()
        return f"functions_run_eagerly={run_eagerly}, checks_numerics={_checks_numerics()}"

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        self._partition.lay_out(self._model)
        # Functions that were traced with variables that have moved since are stale.
        if self._moves.found(self._variables()):
            self._remake_functions(name)
        check_no_strategy(self._model)
        if isinstance(self._partition, Partition):
            is_planned = getattr(self._model, name) is not None and not force
            if self._partition.rows.expect(name.partition("_")[0], is_planned):
                setattr(self._model, name, None)
        if self._partition.is_one_device:
            leave_to_one_device(self._model)  # another model of the template may spread its weights
            return make(force)
        before = getattr(self._model, name)
        # XLA compiles a cluster for one device: a compiled step would leave the others idle.
        # What each device computes is compiled instead.
        with unchanged(self._model, "jit_compile", False):
            made = make(force)
        function = getattr(self._model, name)
        if function is before:
            return made
        if self.group is not None:
            setattr(self._model, name, self._counted(function, self.group))
            return made
        if begins_late(self._model, name):
            function = found_before(function)
            setattr(self._model, name, function)
        if name == "train_function" and isinstance(self._partition, Partition):
            self._notice(function, self._partition.rows)
        return made

    def _notice(self, function: Callable[..., Any], rows: BatchRows) -> None:
        """Has a training function warn of few rows in its first steps, and then put back."""

        def put_back() -> None:
            if self._model.train_function is noticed:
                self._model.train_function = function

        noticed = self._model.train_function = rows.told_by(function, put_back)

    def _remake_functions(self, name: str) -> None:
        """Drops the step functions, and makes those again that a loop around this may be using.

        Such as `fit` around an evaluation, for which the function `name` is being made.
        """
        others = [f"{kind}_function" for kind in ("train", "test", "predict")]
        used = [one for one in others if one != name and getattr(self._model, one) is not None]
        drop_functions(self._model)
        for one in used:
            getattr(self._model, f"make_{one}")()

    def _counted(self, function: Callable[..., Any], group: Group) -> Callable[..., Any]:
        """A step function that counts its steps, and first compares the weights."""
        assert self._batches is not None
        batches = self._batches

        @functools.wraps(function)
        def step(*args: Any) -> Any:
            if self.call is not None:
                group.calls.resume(self.call)
            if self._compared is not self.call:
                self._compared = self.call
                self._compare_weights(group, "weights")
                self.begin_pass()
            if group.readings is not None:
                group.readings.settle()
            batches.begin(self._start, is_loop=self.is_running)
            batches.look()
            with group.counting(lambda: batches.arrived), group.stepping():
                return function(*args)

        return step

    def compare_weights(self, group: Group) -> None:
        """As below, outside of steps."""
        with group.watching():
            self._compare_weights(group, "new weights")

    def _compare_weights(self, group: Group, when: str) -> None:
        """Raises a `ClusterError` if another process has other weights or slots.

        Those that differ in rounding only become those of process 0: some of TensorFlow's sums add
        in any order.
        """
        assert self._peers is not None
        # Of others no process has all: they are compared when they are assigned.
        variables = [one for one in self._variables() if is_here(one)]
        listing = Listing.of_values((one.path, one._value.numpy()) for one in variables)
        found = group.differing(when, str(listing.checksum))
        if found is None:
            return
        # Processes that exchange values of other shapes would wait for ever.
        forms = str([(tuple(one.shape), str(one.dtype)) for one in variables])
        other = group.differing(f"the shapes of {when}", forms)
        values = [variable._value for variable in variables]
        with group.exchanging():
            first = None if other is not None else self._peers.of_first(values)
        if first is None:
            raise group.differs(*(other or found), "weights", listing)
        for variable, value in zip(variables, first):
            variable._value.assign(value)

    @contextlib.contextmanager
    def _rows_compared(self) -> Iterator[None]:
        """Scope of steps: raises a `ClusterError` if another process has other steps or data."""
        assert self._batches is not None
        assert self.group is not None
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            found = self._batches.differing(self._samples.describe)
            if found is None:
                raise
            raise self.group.differs(*found) from error

    def begin_pass(self) -> None:
        if self._batches is not None and tf.executing_eagerly():
            self._start = self._batches.arrived

    def around(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        partition = self._partition
        if partition.is_one_device:
            return step

        @functools.wraps(step)
        def on_all(*args: Any, **kwargs: Any) -> Any:
            if self._batches is None or self.group is None or not self.group.is_in_step:
                result = partition.step(self._model, step, name, (args, kwargs))
            else:
                result = self._step_together(step, name, args, kwargs)
            # They may be built in the step, and be moved before the next loop.
            self._moves.note(self._variables())
            return result

        return on_all

    def _step_together(self, step: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """A step that all processes make, on the whole batch."""
        batches, partition = self._batches, self._partition
        assert batches is not None
        assert isinstance(partition, Partition)
        if batches.is_inside:
            return step(*args, **kwargs)
        with unchanged(batches, "is_inside", True):
            is_plain = len(args) == 1 and not kwargs  # as Keras calls it
            given = args[0] if is_plain else (args, kwargs)
            data, counts = batches.check(given, name, self._samples)
            call = ((data,), {}) if is_plain else data
            takes_own = name == "predict_step"
            together = Together(batches, counts, takes_own, self._variables, partition.names)
            return partition.step(self._model, step, name, call, together)

    def using_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._watched.weights()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with self._watched.weights(), joint.writing(self) as is_writer:
            yield is_writer

    def _variables(self) -> list[keras.Variable]:
        """The weights, the other state, and the optimizer's."""
        optimizer = getattr(self._model, "optimizer", None)
        slots = optimizer.variables if isinstance(optimizer, keras.Optimizer) else []
        return [*self._model.variables, *slots]


def _checks_numerics() -> bool:
    """Whether `tf.debugging.enable_check_numerics` is on, which has no getter."""
    try:
        tf.divide(tf.constant(0.0), 0.0)
    except tf.errors.InvalidArgumentError:
        return True
    return False
