"""The replicas' runs of one traced call, and their gradients, each on its own device."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.boundaries import Found, LookingUp, Meeting, Merging
from keras_multigpu.engines.tensorflow.lookups import Table
from keras_multigpu.engines.tensorflow.peers import Peers
from keras_multigpu.engines.tensorflow.results import LocalResult, tensors_of
from keras_multigpu.engines.tensorflow.segments import Boundary, Cut, RowsOf, Segment
from keras_multigpu.engines.tensorflow.tensors import add, floats, to_dense
from keras_multigpu.engines.tensorflow.trace import Trace
from keras_multigpu.engines.values import Tensor

Gradients = list[Tensor | None]
_Reached = Callable[[tuple[bool, ...]], list[bool]]


@dataclasses.dataclass
class _Leg:
    """One call of a function on one device, with the tape that saw it.

    Attributes:
        device: the device.
        tape: the tape; it watches the sources.
        sources: what gradients are taken by.
        results: what may get gradients.
        reached: whether each source has a gradient from the results that are used; `None` if the
            tape itself knows.
    """

    device: str
    tape: tf.GradientTape
    sources: list[Tensor]
    results: list[Tensor]
    reached: _Reached | None

    def gradients(self, upstream: Gradients, variables: Sequence[tf.Variable]) -> Gradients:
        """The gradients by the sources, and by variables; no loss uses results with `None`."""
        is_used = tuple(one is not None for one in upstream)
        with tf.device(self.device), tf.name_scope("gradients"):
            found = self.tape.gradient(
                [result for result, one_is_used in zip(self.results, is_used) if one_is_used],
                [*self.sources, *variables],
                output_gradients=[tf.identity(one) for one in upstream if one is not None],
            )
        if self.reached is None or all(is_used):
            return found
        known = [*self.reached(is_used), *(True for _ in variables)]
        return [one if is_reached else None for one, is_reached in zip(found, known)]


class Run(abc.ABC):
    """Runs every replica of a traced call.

    Args:
        devices: each replica's device.
        order: the highest derivative that may be taken.

    Attributes:
        by_tables: after `backward`, the gradients of the parts of tables that stayed where they
            are, for each lookup, by their variable's `id`.
    """

    def __init__(self, devices: Sequence[str], order: int):
        self._devices, self._order = devices, order
        self.by_tables: collections.defaultdict[int, list[list[Tensor]]]
        self.by_tables = collections.defaultdict(list)

    @abc.abstractmethod
    def forward(
        self, arguments: Sequence[Any], watched: Sequence[list[Tensor]]
    ) -> list[LocalResult]:
        """Calls every replica with its arguments, of which some tensors are watched."""

    @abc.abstractmethod
    def backward(
        self, upstream: Sequence[Gradients], variables: Sequence[tf.Variable]
    ) -> list[Gradients]:
        """Each replica's gradients by its watched tensors, then by variables.

        `upstream` are the gradients of its results, `None` for those that no loss uses.
        """

    def _tape(self) -> tf.GradientTape:
        return tf.GradientTape(persistent=self._order > 1)


class WholeRun(Run):
    """Runs replicas that don't need each other."""

    def __init__(self, trace: Trace, devices: Sequence[str], order: int):
        super().__init__(devices, order)
        self._trace = trace
        self._legs: list[_Leg] = []

    def forward(
        self, arguments: Sequence[Any], watched: Sequence[list[Tensor]]
    ) -> list[LocalResult]:
        raws = []
        for device, given, sources in zip(self._devices, arguments, watched):
            tape = self._tape()
            with tf.device(device), tape:
                if self._order:
                    tape.watch(sources)
                raws.append(self._trace(*given))
            results = floats(raws[-1].differentiable)
            reached = None if tf.executing_eagerly() else self._reached(given, sources)
            self._legs.append(_Leg(device, tape, sources, results, reached))
        return raws

    def backward(
        self, upstream: Sequence[Gradients], variables: Sequence[tf.Variable]
    ) -> list[Gradients]:
        return [leg.gradients(one, variables) for leg, one in zip(self._legs, upstream)]

    def _reached(self, given: Any, sources: list[Tensor]) -> _Reached:
        # By `id`, because `==` compares the tensors' values.
        places = {id(argument): place for place, argument in enumerate(tensors_of(given))}
        own = [places.get(id(source)) for source in sources]

        def reached(is_used: tuple[bool, ...]) -> list[bool]:
            known = self._trace.reached(is_used)
            return [place is None or known[place] for place in own]

        return reached


class CutRun(Run):
    """Runs replicas that exchange values: all of them to the end of a segment, then the next.

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
        self._legs: list[list[_Leg]] = []
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
            legs.append(_Leg(device, tape, sources, results, _reached_by(segment, keys)))
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
        leg: _Leg,
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


def _reached_by(segment: Segment, keys: list[int]) -> _Reached:
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
