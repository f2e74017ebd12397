"""Goes through the ways to train a model on n devices, and counts what they need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import keras

from keras_multigpu import engines
from keras_multigpu.devices import choose_devices
from keras_multigpu.graphs.graph import is_graph
from keras_multigpu.reports.plan_report import Choice
from keras_multigpu.reports.subject import Subject
from keras_multigpu.reports.workload import Shard, Sizes

_MOST_HALVINGS = 4  # of a batch, whose parts' gradients are accumulated
_AGAIN = 4 / 3  # a step computes forward once and backward twice; recomputed, forward twice
_TOO_HIGH = 1.25  # an estimate of memory may be so many times what is counted


@dataclasses.dataclass(frozen=True)
class _Way:
    """A mode, what it spreads, and on how many devices."""

    mode: str
    shard: Shard | None
    devices: int


@dataclasses.dataclass
class Tried:
    """A way to train a model, and a choice for each number of equal parts of a batch."""

    model: keras.Model
    choices: list[Choice]


class Search:
    """The ways to train on so many devices, or on one; `rows` are a device's in mode `"data"`."""

    def __init__(self, subject: Subject, devices: int, shards: list[Shard | None], limit: int):
        self.subject, self._limit = subject, limit
        self.rows = math.ceil(subject.batch_size / devices)
        self._are_here = devices <= len(choose_devices(None, None))
        self._ways = [_Way("data", None, 1)]
        if devices > 1:
            self._ways += [_Way("data", shard, devices) for shard in shards]
            can_place = is_graph(subject.model) and not engines.current().partitions
            if devices in subject.cuts or can_place:
                self._ways.append(_Way("model", None, devices))

    def _rows_of(self, way: _Way) -> int:
        """The rows of a device."""
        is_sliced = way.mode == "data" and way.devices > 1
        return self.rows if is_sliced else self.subject.batch_size

    def count(self, model: keras.Model) -> dict[int, Sizes]:
        """The counted sizes of a copy of the model, by the rows of a device."""
        return {
            rows: self.subject.count_sizes(model, rows, max(rows // 2**_MOST_HALVINGS, 1))
            for rows in {self._rows_of(way) for way in self._ways}
        }

    def find(
        self, model: keras.Model, sizes: Mapping[int, Sizes], *, remat: bool = False
    ) -> Iterator[Tried]:
        """The ways to train a copy of the model, whose sizes were counted."""
        powers = [2**power for power in range(1, _MOST_HALVINGS + 1)]
        for way in self._ways if sizes else ():
            equal = [one for one in powers if self.subject.batch_size % (one * way.devices) == 0]
            is_given = way.mode == "model" and way.devices in self.subject.cuts
            numbers = (1, *([] if is_given else equal))  # a cut is for a whole batch
            own = sizes[self._rows_of(way)]
            yield Tried(model, [self._predict(way, own, parts, remat) for parts in numbers])

    def choose(self, ways: Sequence[Tried]) -> list[Choice]:
        """For each way, the least number of parts that fits, or that which needs least memory.

        Estimates are replaced by counts until the fastest way that fits is counted.
        """
        while found := [(one, way) for way in ways if (one := self._likely(way)) is not None]:
            first, way = min(found, key=lambda pair: pair[0].rank)
            if not self._can_count(first):
                break
            counted = self.subject.count_memory(
                way.model, first.rows, first.devices, first.parts, **first.options
            )
            way.choices[way.choices.index(first)] = first.with_memory(counted, self._limit)
        return [
            next((one for one in way.choices if one.fits), min(way.choices, key=_memory))
            for way in ways
        ]

    def _can_count(self, choice: Choice) -> bool:
        return self._are_here and not choice.is_counted

    def _likely(self, way: Tried) -> Choice | None:
        """The least number of parts that fits, or may."""
        for one in way.choices:
            slack = _TOO_HIGH if self._can_count(one) else 1
            if one.memory is not None and one.memory <= slack * self._limit:
                return one
        return None

    def _predict(self, way: _Way, sizes: Sizes, parts: int, remat: bool) -> Choice:
        """A way to train on one part of a batch after the other."""
        rows, cuts = self.subject.batch_size // parts, dict(self.subject.cuts)
        if way.mode == "model" and way.devices not in cuts:
            cuts[way.devices] = self.subject.find_cut(way.devices, rows, sizes)
        if parts > 1:  # the sums of the gradients are kept like slots
            sizes = dataclasses.replace(sizes, slots=sizes.slots + sizes.gradients)
        step = self.subject.workload().step.sped_up(1 / _AGAIN if remat else 1)
        found = self.subject.predict(
            way.mode, way.devices, step=step, batch_size=rows, sizes=sizes, cuts=cuts,
            shard=way.shard,
        )  # fmt: skip
        fits = found.load.memory is not None and found.load.memory <= self._limit
        is_counted = parts == way.devices == 1
        shard = way.shard.name if way.shard else None
        return Choice(found, shard, parts, rows, remat, fits, is_counted)


def _memory(choice: Choice) -> float:
    return math.inf if choice.memory is None else choice.memory
