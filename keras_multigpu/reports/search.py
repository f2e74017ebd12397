"""Goes through the ways to train a model on n devices, and counts what they need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import keras

from keras_multigpu import engines
from keras_multigpu.devices import choose_devices
from keras_multigpu.reports.plan_report import Choice
from keras_multigpu.reports.subject import Subject, in_step
from keras_multigpu.reports.workload import Shard, Sizes

_MOST_HALVINGS = 4  # of a batch, whose parts' gradients are accumulated
_AGAIN = 4 / 3  # a step computes forward once and backward twice; recomputed, forward twice
_TOO_HIGH = 1.25  # an estimate of memory may be so many times what is counted

Kind = tuple[str, Shard | None, int]
"""A mode, what it spreads, and the number of devices."""
Way = list[Choice]
"""Choices that differ only in the number of equal parts of a batch, the fewest first."""


class Search:
    """The ways to train on so many devices, or on one."""

    def __init__(self, subject: Subject, devices: int, kinds: Sequence[Kind], limit: int):
        self.subject, self._kinds, self._limit = subject, kinds, limit
        self.recomputing: keras.Model | None = None  # a copy that computes activations again
        self._takes_fewer = subject.takes_fewer
        self._are_here = devices <= len(choose_devices(None, None))

    def count(self, model: keras.Model) -> dict[int, Sizes]:
        """The counted sizes of a copy of the model, by the rows of a device."""
        most = self.subject.most_rows
        asked = {rows: min(rows, most) for rows in (self.subject.rows, self.subject.batch_size)}
        found = {rows: self._count_sizes(model, rows) for rows in set(asked.values())}
        return {rows: found[counted] for rows, counted in asked.items()}

    def _count_sizes(self, model: keras.Model, rows: int) -> Sizes:
        """The sizes of a copy of the model, from its memory on some rows and on fewer.

        In between, and beyond what a processor counts, the memory is taken to grow evenly. It does
        not: with few rows the update needs most, with many the activations do. So it is rather
        less in between.
        """
        fewer = self.subject.few_rows if self._takes_fewer else 0
        if rows == self.subject.most_rows < self.subject.batch_size:  # and more are estimated
            fewer = max(rows // 2, 1)
        many = self.subject.count(model, rows)
        grown = in_step(many) - (in_step(self.subject.count(model, fewer)) if fewer else 0)
        row = max(grown / (rows - fewer), 0.0) if rows > fewer else 0.0
        return dataclasses.replace(
            self.subject.sizes,
            slots=many.bytes(kind="slots"),
            activations=round(row),
            working=max(round(in_step(many) - rows * row), 0),
            passing=min(round(row), many.bytes(kind="temporaries") // rows),
            unknown=sum(one.unknown for one in many.held),
        )

    def find(self, sizes: Mapping[int, Sizes], *, remat: bool = False) -> list[Way]:
        """The ways to train a copy of the model, whose sizes were counted."""
        batch_size = self.subject.batch_size
        powers = [2**power for power in range(1, _MOST_HALVINGS + 1)]
        ways: list[Way] = []
        for kind in self._kinds if sizes else ():
            mode, _, devices = kind
            own = sizes[self.subject.rows if mode == "data" and devices > 1 else batch_size]
            is_whole = not self._takes_fewer
            if mode == "model" and (devices in self.subject.cuts or engines.current().partitions):
                if remat:
                    continue  # what was given, or counted, is of all activations kept
                cut, counted = self.subject.find_cut(devices, batch_size, own)
                # The user's is for the whole batch; a compiler takes its time.
                is_whole |= counted is None or (cut.memory or 0) <= self._limit
            equal = [one for one in powers if batch_size % (one * devices) == 0]
            numbers = [1] if is_whole else [1, *equal]
            ways.append([self._predict(*kind, own, parts, remat) for parts in numbers])
        return ways

    def choose(self, ways: Sequence[Way]) -> list[Choice]:
        """For each way, the least number of parts that fits, or that which needs least memory.

        Estimates are replaced by counts until the fastest way that fits is counted, or, if none
        fits, the one that needs least memory.
        """
        while ways:
            found = [(one, way) for way in ways if (one := self._likely(way)) is not None]
            least = min(((min(way, key=_memory), way) for way in ways), key=lambda p: _memory(p[0]))
            first, way = min(found, key=lambda pair: pair[0].rank, default=least)
            if not self._can_count(first):
                break
            model = self.recomputing if first.remat else self.subject.model
            asked = (model, first.rows, first.devices, first.parts)
            counted = self.subject.count(*asked, **first.options).peak
            way[way.index(first)] = first.with_memory(counted, self._limit)
        return [next((one for one in way if one.fits), min(way, key=_memory)) for way in ways]

    def _can_count(self, choice: Choice) -> bool:
        return self._are_here and not choice.is_counted and choice.rows <= self.subject.most_rows

    def _likely(self, way: Way) -> Choice | None:
        """The least number of parts that fits, or may."""
        for one in way:
            slack = _TOO_HIGH if self._can_count(one) else 1
            if one.memory is not None and one.memory <= slack * self._limit:
                return one
        return None

    def _predict(
        self, mode: str, shard: Shard | None, devices: int, sizes: Sizes, parts: int, remat: bool
    ) -> Choice:
        """A way to train on one part of a batch after the other."""
        rows = self.subject.batch_size // parts
        if parts > 1:  # the sums of the gradients are kept like slots
            sizes = dataclasses.replace(sizes, slots=sizes.slots + sizes.gradients)
        assert self.subject.step is not None
        step = self.subject.step.sped_up(1 / _AGAIN if remat else 1)
        found = self.subject.predict(
            mode, devices, step=step, batch_size=rows, sizes=sizes, shard=shard
        )
        fits = found.load.memory is not None and found.load.memory <= self._limit
        name = shard.name if shard else None
        has_held = mode == "model" and engines.current().partitions
        is_counted = parts == 1 and ((devices == 1 and rows <= self.subject.most_rows) or has_held)
        return Choice(found, name, parts, rows, remat, fits, is_counted=is_counted)


def _memory(choice: Choice) -> float:
    return math.inf if choice.memory is None else choice.memory
