"""The batches of steps that joined processes make together on TensorFlow.

Every process must be in the same step of the same pass over its data. It has the whole batch, as
the others do, or its part: then each gathers the parts of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.cluster.joint import NO_WHOLE_NUMBER, check_has_rows
from keras_multigpu.engines.cluster.listing import Listing, describe
from keras_multigpu.engines.cluster.places import odd_one
from keras_multigpu.engines.shared import count_rows, in_fresh_thread, is_array
from keras_multigpu.engines.tensorflow.cluster.collectives import can_cross
from keras_multigpu.engines.tensorflow.cluster.facts import (
    Outside,
    digest,
    digest_of_part,
    is_composite,
    rows_of,
)
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.cluster.samples import EVERY, Samples, alike
from keras_multigpu.engines.tensorflow.tensors import take_rows
from keras_multigpu.engines.values import Tensor

_KINDS = ("steps", "passes", "rows", "values", "programs")
"""What the processes compare at each step, in this order."""


class _Program:
    """What one trace of a step computes.

    Attributes:
        checksum: of it, for the step itself to read.
        traced: it.
        outside: variables that are none of the model's, and tables, which are compared, too.
        latest: it, with their values.
    """

    def __init__(self) -> None:
        self.checksum = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.traced = self.latest = Listing()
        self.outside: Sequence[Outside] = ()

    def look(self) -> None:
        """Notes what they hold."""
        values = Listing()
        for one in self.outside:
            values.add(*one.read())
        self.latest = Listing.of_all([self.traced, values])
        self.checksum.assign(self.latest.checksum)


class JointBatches:
    """The batches of a model's steps.

    Args:
        peers: the processes.
        host: this process's processor.
        are_parts: whether each process has its part of a batch; else all have the same batch.

    Attributes:
        are_parts: the argument.
    """

    def __init__(self, peers: Peers, host: str, are_parts: bool):
        self.peers, self.are_parts = peers, are_parts
        self.is_inside = False  # of a step, which has the whole batch
        with tf.init_scope():
            with tf.device(peers.collectives.device):  # of each process, with its number of rows
                none = tf.zeros([peers.collectives.count, len(_KINDS) + 1], tf.int64)
                self._facts = tf.Variable(none, trainable=False, name="facts")
            with tf.device(host):
                # How many batches have come, how many of them before this pass over the data, and
                # in each of how many training steps weights are sampled.
                self._come, self._start, self._every = (
                    tf.Variable(first, dtype=tf.int64, trainable=False, name=name)
                    for name, first in (("come", 0), ("start", 0), ("every", EVERY))
                )
        self._traced: dict[int, tuple[str, str]] = {}  # a step's name, and its batch, by checksum
        self._programs: list[_Program] = []

    @property
    def arrived(self) -> int:
        """How many batches have come to steps of this process; a thread may ask."""
        return int(self._come.numpy())

    def note(self, listing: Listing, outside: Sequence[Outside]) -> None:
        """Notes what the step computes whose batch was checked last: a part of that check.

        `outside` are compared whenever it begins.
        """
        program = self._programs[-1]
        program.traced, program.outside = listing, outside
        with tf.init_scope():
            program.look()

    def look(self) -> None:
        """Before steps: callbacks may have changed what they read."""
        for program in self._programs:
            if program.outside:
                program.look()

    def _traced_program(self) -> Tensor:
        """A checksum of the step that begins; its value is there when it has been traced."""
        if tf.executing_eagerly():
            return tf.constant(0, tf.int64)
        in_fresh_thread(lambda: self._programs.append(_Program()))
        return self._programs[-1].checksum.read_value()

    def begin(self, start: int, is_loop: bool) -> None:
        """Notes how many batches had come when this pass over the data began."""
        if self.are_parts:
            self._start.assign(start)
        # Of single steps there may be few.
        self._every.assign(EVERY if is_loop else 1)

    def differing(
        self, describe: Callable[[int], str] = str
    ) -> tuple[int, int, str, str | Listing] | None:
        """The first process that differed from most in the latest step, if any did.

        `describe` tells what a number of the samples stands for.

        Returns:
            The process, one of the others, in what they differed, and what to tell of this process.
        """
        facts = self._facts.numpy().tolist()
        own = facts[self.peers.collectives.number]
        for column, kind in enumerate(_KINDS):
            found = odd_one([one[column] for one in facts])
            if found is None:
                continue
            if kind == "values":
                return *found, kind, describe(max(facts[k][column] for k in found) - 1)
            if kind == "programs":
                latest = (one.latest for one in self._programs)
                known = (one for one in latest if one.checksum == own[column])
                return *found, kind, next(known, Listing())
            step, form = self._traced.get(own[0], ("", ""))
            told = {"steps": step, "passes": f"step {own[1] + 1} of a pass", "parts": form}
            kind = "parts" if kind == "rows" and self.are_parts else kind
            return *found, kind, told.get(kind, "")
        return None

    def check(self, data: Any, step: str, samples: Samples | None = None) -> tuple[Any, Tensor]:
        """Fails if another process is in another step, or has other data: see `differing`.

        `step` is the step's name. With `samples`, it fails too if those of another process differ.
        Returns the data, and how many rows each process has.
        """
        collectives = self.peers.collectives
        if self.are_parts:
            data = _as_tensors(data)
            _check_types(data)
        name = zlib.crc32(step.encode())
        self._traced[name] = step, describe(data)
        with tf.device(collectives.device):
            facts = [
                tf.constant(name, tf.int64),
                self._position(),
                (digest_of_part if self.are_parts else digest)(data),
                self._traced_program(),
                tf.cast(rows_of(data), tf.int64),
            ]
        with tf.control_dependencies(facts):
            come = self._come.assign_add(1)
        with tf.device(collectives.device), tf.control_dependencies([come]):
            # A step that does not train needs weights that nobody has changed.
            every = self._every.read_value() if step == "train_step" else 1
            taken = tf.zeros([0, 2], tf.float64) if samples is None else samples.take(come, every)
            of_all = collectives.of_all(
                tf.concat([facts, tf.reshape(tf.bitcast(taken, tf.int64), [-1])], 0)
            )
            values = alike(of_all[:, 5:]) if samples is not None else 0 * of_all[:, 0]
            known = tf.concat([of_all[:, :3], values[:, None], of_all[:, 3:5]], axis=1)
            with tf.control_dependencies([self._facts.assign(known)]):
                are_alike = tf.reduce_all(known[:, :-1] == known[0, :-1])
                check = tf.debugging.Assert(are_alike, [known])
        # In eager mode the check is done already.
        with tf.control_dependencies([] if check is None else [check]):
            same = tf.nest.map_structure(
                lambda one: tf.identity(one) if tf.is_tensor(one) else one,
                data,
                expand_composites=True,
            )
            return same, tf.identity(known[:, -1])

    def _position(self) -> Tensor:
        """How many batches this pass has had; it is compared where they are parts."""
        if not self.are_parts:
            return tf.constant(-1, tf.int64)
        return self._come.read_value() - self._start.read_value()

    def whole(self, data: Any) -> Any:
        """The whole batch, from this process's part: the rows of all processes in their order."""
        flat = tf.nest.flatten(data)
        places = [k for k, one in enumerate(flat) if tf.is_tensor(one) and len(one.shape)]
        parts = [flat[place] for place in places]
        for place, own, *of_all in zip(places, parts, *self.peers.of_processes(parts)):
            flat[place] = tf.ensure_shape(tf.concat(of_all, axis=0), [None, *own.shape[1:]])
        return tf.nest.pack_sequence_as(data, flat)

    def own(self, outputs: Any, counts: Tensor) -> Any:
        """This process's rows of a whole batch's outputs; each row may have several of an output.

        `counts` are the rows of all processes.
        """
        number = self.peers.collectives.number
        total, start = tf.reduce_sum(counts), tf.reduce_sum(counts[:number])

        def take(output: Any) -> Any:
            if not tf.is_tensor(output):
                return output
            check_has_rows(output)
            rows = tf.cast(count_rows(output), tf.int64)
            several = rows // tf.maximum(total, 1)
            check = tf.debugging.assert_equal(rows, several * total, NO_WHOLE_NUMBER)
            with tf.control_dependencies([] if check is None else [check]):
                return take_rows(output, start * several, counts[number] * several)

        return tf.nest.map_structure(take, outputs)


def _as_tensors(data: Any) -> Any:
    """Arrays become tensors; other values stay."""
    return tf.nest.map_structure(
        lambda one: tf.convert_to_tensor(one) if is_array(one) and not tf.is_tensor(one) else one,
        data,
    )


def _check_types(data: Any) -> None:
    for one in tf.nest.flatten(data):
        if tf.is_tensor(one) and (is_composite(one) or not can_cross(one.dtype)):
            kind = f"{type(one).__name__} " if is_composite(one) else "tensor "
            raise ValueError(
                "Where each process gives its part of a batch, the batch has dense numbers and "
                f"flags only, on TensorFlow. Received: a {kind}of type {one.dtype.name!r}. Make it "
                "so before (`dataset.map`), or join with `data='same'`."
            )
        if tf.is_tensor(one) and one.shape.rank is None:
            raise ValueError(
                "Where each process gives its part of a batch, the numbers of its axes are known "
                f"before a step. Received: {one}. Give it its shape (`tf.ensure_shape`)."
            )
