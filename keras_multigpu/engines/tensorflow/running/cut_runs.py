"""Runs replicas that exchange values: all of them to the end of a segment, then the next."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.results import LocalResult, tensors_of
from keras_multigpu.engines.tensorflow.running.boundaries import Found, LookingUp, Meeting, Merging
from keras_multigpu.engines.tensorflow.running.runs import Gradients, Leg, Reached, Run
from keras_multigpu.engines.tensorflow.tensors import add, floats, to_dense
from keras_multigpu.engines.tensorflow.tracing.segments import Boundary, Cut, RowsOf, Segment
from keras_multigpu.engines.tensorflow.weights.lookups import Table
from keras_multigpu.engines.values import Tensor


class CutRun(Run):
    """Runs the replicas segment by segment; between two segments they exchange values.

    With `peers` the replicas of joined processes take part in each exchange. `tables` has the
    tables of which rows are looked up, by their variable's `id`.

    Values and gradients have the `id` of their tensor in the traced graphs as their key.
    """

    def __init__(
        self,
        cut: Cut,
        devices: Sequence[str],
        order: int,
        tables: Mapping[int, Table],
        peers: Peers | None = None,
    ):
        super().__init__(devices, order)
        self._cut = cut
        self._peers = peers
        self._watched: list[list[int]] = []
        self._legs: list[list[Leg]] = []
        self._keys: list[list[int]] = []
        self._tables = tables
        self._meetings: list[Meeting] = []

    def forward(
        self, arguments: Sequence[Any], watched: Sequence[list[Tensor]]
    ) -> list[LocalResult]:
        first = self._cut.segments[0]
        values: list[dict[int, Tensor]] = []
        for given, sources in zip(arguments, watched):
            pairs = list(zip(first.takes, tensors_of(given)))
            values.append({id(symbol): one for symbol, one in pairs})
            keys = {id(one): id(symbol) for symbol, one in pairs}
            self._watched.append([keys[id(source)] for source in sources])
        may_get = set(self._watched[0])
        for place, segment in enumerate(self._cut.segments):
            if place:
                boundary = self._cut.boundaries[place - 1]
                self._meet(boundary, values)
                may_get.add(id(boundary.merged))
            self._run(segment, values, may_get, arguments if segment is first else None)
            may_get |= set(map(id, segment.results))
        return [self._result(own) for own in values]

    def _run(
        self,
        segment: Segment,
        values: Sequence[dict[int, Tensor]],
        may_get: set[int],
        arguments: Sequence[Any] | None,
    ) -> None:
        """Calls a segment on every device; adds what it returns to the replicas' values."""
        keys = [id(one) for one in segment.takes if id(one) in may_get]
        legs = []
        for number, (device, own) in enumerate(zip(self._devices, values)):
            sources, tape = [own[key] for key in keys], self._tape()
            with tf.device(device), tape:
                if self._order:
                    tape.watch(sources)
                if arguments:
                    made = segment.function(*arguments[number])
                else:
                    made = segment(*(own.get(id(one), one) for one in segment.takes))
            own.update(zip(map(id, segment.gives), made))
            results = [own[id(one)] for one in segment.results]
            legs.append(Leg(device, tape, sources, results, _reached_by(segment, keys)))
        self._legs.append(legs)
        self._keys.append(keys)

    def _meet(self, boundary: Boundary, values: Sequence[dict[int, Tensor]]) -> None:
        """Has the replicas exchange values."""
        what, devices = boundary.what, self._devices
        meeting: Meeting
        if isinstance(what, RowsOf):
            table = self._tables[id(what.table)]
            meeting = LookingUp(boundary, what, devices, table, self.by_tables)
        else:
            is_differentiated = self._order > 0
            meeting = Merging(boundary, what, devices, self._tape(), is_differentiated, self._peers)
        meeting.forward(values)
        self._meetings.append(meeting)

    def _result(self, values: dict[int, Tensor]) -> LocalResult:
        results = tf.nest.map_structure(
            lambda one: values[id(one)], self._cut.results, expand_composites=True
        )
        return LocalResult(**results)

    def backward(
        self, upstream: Sequence[Gradients], variables: Sequence[tf.Variable]
    ) -> list[Gradients]:
        self.by_tables.clear()
        found: list[Found] = [collections.defaultdict(list) for _ in upstream]
        others: list[list[list[Tensor]]] = [[[] for _ in variables] for _ in upstream]
        for own, given in zip(found, upstream):
            for symbol, one in zip(floats(self._cut.differentiable), given):
                own[id(symbol)] += [] if one is None else [one]
        for place in reversed(range(len(self._legs))):
            if place < len(self._meetings):
                self._meetings[place].backward(found)
            for number, leg in enumerate(self._legs[place]):
                self._run_back(place, leg, found[number], others[number], variables)
        return [
            [_sum(device, own[key]) for key in watched] + [_sum(device, one) for one in sums]
            for device, own, watched, sums in zip(self._devices, found, self._watched, others)
        ]

    def _run_back(
        self,
        place: int,
        leg: Leg,
        found: Found,
        others: list[list[Tensor]],
        variables: Sequence[tf.Variable],
    ) -> None:
        """Adds the gradients of one call to those found before."""
        results = self._cut.segments[place].results
        with tf.device(leg.device), tf.name_scope("gradients"):
            upstream = [_dense(add(found.pop(id(one), []))) for one in results]
        if all(one is None for one in upstream):
            return
        sums = [*(found[key] for key in self._keys[place]), *others]
        for gradients, one in zip(sums, leg.gradients(upstream, variables)):
            gradients += [] if one is None else [one]


def _reached_by(segment: Segment, keys: list[int]) -> Reached:
    def reached(is_used: tuple[bool, ...]) -> list[bool]:
        known = segment.reached(is_used)
        return [known[key] for key in keys]

    return reached


def _sum(device: str, gradients: list[Tensor]) -> Tensor | None:
    with tf.device(device), tf.name_scope("gradients"):
        return gradients[0] if len(gradients) == 1 else add(gradients)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Makes sparse gradients dense, for tensors that are no tables."""
    if isinstance(gradient, tf.IndexedSlices):
        return to_dense(gradient, gradient.dense_shape[0])
    return gradient
