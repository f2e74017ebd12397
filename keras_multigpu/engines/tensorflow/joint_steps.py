"""Keras's training on TensorFlow by several processes: what they compare, and write together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.cluster import joint
from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.joint import arguments, together, write_once
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.runners import Runner, TrainedModel
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.cluster import processes
from keras_multigpu.engines.tensorflow.cluster.processes import Group
from keras_multigpu.engines.tensorflow.cluster.samples import Samples
from keras_multigpu.engines.tensorflow.partition.together import Together
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.runners import PartitionRunner
from keras_multigpu.engines.tensorflow.steps import TensorFlowSteps
from keras_multigpu.engines.tensorflow.weights.divided import is_here


def steps_of(model: TrainedModel, runner: Runner) -> TensorFlowSteps:
    """The steps of a model on devices of this process, or of several."""
    is_joint = isinstance(runner, PartitionRunner) and runner.peers is not None
    return (JointTensorFlowSteps if is_joint else TensorFlowSteps)(model, runner)


class JointTensorFlowSteps(TensorFlowSteps):
    """Steps that several processes make together, of a model on their devices.

    Attributes:
        group: the processes.
        is_running: whether a loop is running.
        call: the latest call that they have made together.
        number: which of their models it is.
    """

    _partition: Partition

    def __init__(self, model: TrainedModel, runner: Runner):
        super().__init__(model, runner)
        group = processes.current()
        assert group is not None
        assert isinstance(runner, PartitionRunner)
        assert runner.peers is not None
        assert runner.batches is not None
        self.group: Group = group
        self.is_running = False
        self.call: Call | None = None
        self.number: int | None = next(group.models)
        self._peers, self._batches = runner.peers, runner.batches
        self._samples = Samples(model, is_here)
        self._start = 0  # how many batches had come when this pass over the data began
        self._compared: Call | None = None  # where the processes have compared the weights

    @property
    def settings(self) -> str:
        """Those of TensorFlow that change what a step computes."""
        return settings()

    def _run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_running:  # a nested loop: evaluation within `fit`
            with self._rows_compared():
                return loop(*args, **kwargs)
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

    def _run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_running:
            with self._rows_compared():
                return step(*args, **kwargs)
        with (
            together(self, "single steps", arguments(step, args, kwargs), is_loop=False),
            self.group.watching(),
            self._rows_compared(),
        ):
            return step(*args, **kwargs)

    def _wrap(self, name: str, function: Callable[..., Any]) -> None:
        """A step function then counts its steps, and first compares the weights."""
        batches, group = self._batches, self.group

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

        setattr(self.model, name, step)

    def compare_weights(self, group: Group) -> None:
        """As below, outside of steps."""
        with group.watching():
            self._compare_weights(group, "new weights")

    def _compare_weights(self, group: Group, when: str) -> None:
        """Raises a `ClusterError` if another process has other weights or slots.

        Those that differ in rounding only become those of process 0: some of TensorFlow's sums add
        in any order.
        """
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
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            found = self._batches.differing(self._samples.describe)
            if found is None:
                raise
            raise self.group.differs(*found) from error

    def begin_pass(self) -> None:
        if tf.executing_eagerly():
            self._start = self._batches.arrived

    def _step(self, step: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        batches, partition = self._batches, self._partition
        if not self.group.is_in_step:
            return super()._step(step, name, args, kwargs)
        if batches.is_inside:
            return step(*args, **kwargs)
        with unchanged(batches, "is_inside", True):
            is_plain = len(args) == 1 and not kwargs  # as Keras calls it
            given = args[0] if is_plain else (args, kwargs)
            data, counts = batches.check(given, name, self._samples)
            call = ((data,), {}) if is_plain else data
            takes_own = name == "predict_step"
            together = Together(batches, counts, takes_own, self._variables, partition.names)
            return partition.step(self.model, step, name, call, together)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with self._watched.weights(), joint.writing(self) as is_writer:
            yield is_writer


def settings() -> str:
    """Settings of TensorFlow that change what a step computes."""
    run_eagerly = tf.config.functions_run_eagerly()
    return f"functions_run_eagerly={run_eagerly}, checks_numerics={_checks_numerics()}"


def _checks_numerics() -> bool:
    """Whether `tf.debugging.enable_check_numerics` is on, which has no getter."""
    try:
        tf.divide(tf.constant(0.0), 0.0)
    except tf.errors.InvalidArgumentError:
        return True
    return False
