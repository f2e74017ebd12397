"""Variables of which several processes have parts: all take part, whichever of them reads one.

A process that reads, or is about to assign, asks the others on the board. They take part when they
do the same, before their next step, or while they wait for another process.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.cluster.listing import digest_of
from keras_multigpu.engines.cluster.places import odd_one
from keras_multigpu.engines.tensorflow.cluster.collectives import packed, unpacked
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.names import first, full_name
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.values import Tensor

_AT_ONCE = 2**24  # elements that a process sends at a time
_STEP, _WAITS, _ASSIGNS = 0, -1, -2  # what a process does that reads nothing
_TOLD = {_STEP: "a step", _WAITS: "another call", _ASSIGNS: "an assignment of weights"}


class Readings:
    """What the processes read and assign together.

    Args:
        group: the processes.
    """

    def __init__(self, group: Any):
        self._group, self._done = group, 0  # how often they have met
        self._numbers = itertools.count(1)
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._peers: dict[int, Peers] = {}

    @property
    def _are_used(self) -> bool:
        """Whether there were such variables, alike in all processes."""
        return bool(self._peers)

    def add(self, variable: Any, peers: Peers) -> int:
        """Takes a new variable; gives its number."""
        number = next(self._numbers)
        self._variables[number], self._peers[number] = variable, peers
        return number

    def read(self, number: int) -> np.ndarray:
        """The whole value of a variable."""
        with self._group.watching():
            self._ask()
            return self._exchange(number)[number]

    def meet(self, digest: int) -> None:
        """Waits until all are about to assign a value of this checksum."""
        with self._group.watching():
            self._ask()
            while self._exchange(_ASSIGNS, digest):
                self._ask()

    def settle(self) -> None:
        """Before a step: takes part in what others read."""
        while self._are_used and self._exchange(_STEP):
            pass

    def attend(self) -> None:
        """Takes part, if another process has asked for it, while this one waits."""
        if self._are_used and self._group.asked > self._done:
            with self._group.watching():
                self._exchange(_WAITS)

    def _ask(self) -> None:
        self._group.ask(self._done + 1)

    def _exchange(self, kind: int, digest: int = 0) -> dict[int, np.ndarray]:
        """Meets the others; gives what some of them read, the value if this process does."""
        group, collectives = self._group, next(iter(self._peers.values())).collectives
        with tf.init_scope(), group.exchanging(), group.places.aside():
            every = collectives.of_all(tf.constant([kind, digest], tf.int64)).numpy().tolist()
            self._done += 1
            wanted = sorted({one for one, _ in every if one > 0})
            found = {one: self._whole(one, is_wanted=one == kind) for one in wanted}
        if not wanted:
            kinds, digests = zip(*every)
            if odd := odd_one(kinds):
                number, other = odd
                both = _TOLD[kinds[number]], _TOLD[kinds[other]]
                raise group.differs(number, other, "steps", both=both)
            if odd := odd_one(digests):
                raise group.differs(*odd, "weights")
        return found

    def _whole(self, number: int, *, is_wanted: bool) -> Any:
        """The whole value, in host memory, if it is wanted: it crosses in pieces."""
        variable, peers = self._variables[number], self._peers[number]
        division, dtype, collectives = variable.division, variable.dtype, peers.collectives
        with tf.device(collectives.device):
            own = tf.concat([part.read_value() for part in variable.parts], division.axis)
            flat = packed(own, tf.size(own))
        shapes = [own.shape.as_list() for _ in shares_of(division, peers.owners)]
        for shape, size in zip(shapes, shares_of(division, peers.owners)):
            shape[division.axis] = size
        lengths = list(map(math.prod, shapes))
        most = max(lengths)
        pieces: list[list[np.ndarray]] = [[] for _ in shapes]
        for start in range(0, most, _AT_ONCE):
            sent = [flat[start : start + _AT_ONCE]] * collectives.count
            arrived = collectives.exchange(sent, min(most, _AT_ONCE))
            for row, piece in zip(pieces, arrived):
                row.extend([piece[: min(most - start, _AT_ONCE)].numpy()] if is_wanted else [])
        if not is_wanted:
            return None
        parts = [
            np.concatenate(row)[:length].reshape(shape)
            for row, length, shape in zip(pieces, lengths, shapes)
        ]
        with tf.device(full_name(first("cpu"))):
            return unpacked(tf.constant(np.concatenate(parts, division.axis)), dtype).numpy()


def shares_of(division: Division, owners: Sequence[int]) -> list[int]:
    """How much each process has of the axis along which a variable is divided."""
    shares = [0] * (max(owners) + 1)
    for size, owner in zip(division.sizes, owners):
        shares[owner] += size
    return shares


def others_of(group: Any, peers: Peers) -> Others:
    """The processes that have parts of a model's variables."""
    if group.readings is None:
        group.readings = Readings(group)
    return Others(group, group.readings, peers)


class Others:
    """The processes that have parts of a model's variables, as one of them sees them.

    Args:
        group: the processes.
        readings: what they read together.
        peers: their devices.

    Attributes:
        own: the numbers of the parts that this process has.
    """

    def __init__(self, group: Any, readings: Readings, peers: Peers):
        self._group, self._readings, self._peers = group, readings, peers
        self.own = tuple(peers.own)

    def add(self, variable: Any, value: np.ndarray) -> int:
        """Takes a new variable; gives its number."""
        return self._readings.add(variable, self._peers)

    def read(self, variable: Any) -> np.ndarray:
        """The whole value."""
        return self._readings.read(variable.number)

    def meet(self, variable: Any, value: Any) -> None:
        """Waits until all are about to assign the value."""
        digest = digest_of([variable.number, *_arrays(value)], sys.maxsize)
        self._readings.meet(digest)

    def join(self, own: Tensor, division: Division) -> Tensor:
        """The whole value, within a step.

        Raises:
            RuntimeError: if it is in a function that this process runs alone.
        """
        if not self._group.is_in_step:
            raise RuntimeError(
                "With `shard` over several processes each has a part of a weight, and a function "
                "that one process runs alone can't read it. Received: a weight of shape "
                f"{tuple(division.shape)}, read outside of the parallel model's own steps. Call "
                "`parallel.get_weights()`, `save_weights`, `predict` or `evaluate` in all "
                "processes. For a model that one process uses alone: "
                "`new.set_weights(parallel.get_weights())`."
            )
        shares = shares_of(division, self._peers.owners)
        return self._peers.gather([own], [division.axis], [shares], own.dtype.name)[0]


def _arrays(value: Any) -> list[np.ndarray]:
    parts = [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]
    return [one.numpy() for one in parts]
