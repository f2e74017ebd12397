"""Spread state, read whole: all processes take part, whichever of them reads.

Between calls all processes read together, as they make all calls together. Within `fit` one process
may read alone, in a callback that writes a file. It asks the others on the board. They take part
when they come to the next step, whose comparison shows that one is reading, or while they wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines.cluster.joint import together
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.jax.cluster import joint
from keras_multigpu.engines.jax.cluster.processes import WEIGHTS, WEIGHTS_AND_SLOTS, Group
from keras_multigpu.engines.jax.cluster.spread_variables import SpreadVariable, gather, take_digests

_TAKES_PART = -3  # beside `WEIGHTS` and `WEIGHTS_AND_SLOTS`: a process that does not read itself


class Readings:
    """Reads the spread state of a model.

    Args:
        steps: the model's steps, whose `lent` tells the value of each variable.
        group: the processes.
    """

    def __init__(self, steps: Any, group: Group):
        self._steps, self._group = steps, group

    @contextlib.contextmanager
    def whole(self, *, slots: bool, wanted: bool, is_compared: bool = False) -> Iterator[None]:
        """Scope in which variables have their whole values, where they are `wanted`.

        With `slots`, those of the optimizer too. Outside of loops all processes enter it together,
        and compare their weights, unless they have just done so.
        """
        steps, group = self._steps, self._group
        kind = WEIGHTS_AND_SLOTS if slots else WEIGHTS
        if steps.is_running:
            group.ask(steps.call)
            with group.explained(), group.places.aside():
                values = self._read(self._meet(kind), wanted)
            steps.call.readings += 1
        else:
            with together(steps, "the reading of weights"):
                if not is_compared:
                    steps.compare_weights(group)
                values = self._read(self._meet(kind), wanted)
        for variable, value in values:
            variable.whole = value
        try:
            yield
        finally:
            for variable, _ in values:
                variable.whole = None

    def take_part(self, kinds: list[int] | None = None) -> None:
        """Takes part in another process's reading; `kinds` is what the processes have said."""
        with self._group.explained(), self._group.places.aside():
            self._read(self._meet(_TAKES_PART) if kinds is None else kinds, wanted=False)
        self._steps.call.readings += 1

    def meet(self) -> None:
        """Waits until all processes are about to assign a value, and takes part in readings."""
        joint.meet("an assignment", self._steps.where.mesh, self._group)

    def compare_new(self) -> None:
        """Compares what was assigned since the last time; raises a `ClusterError`."""
        new = self.take_new()
        if new.digests:
            joint.compare_weights(new, self._steps.where.mesh, self._group)

    def take_new(self) -> Listing:
        """What was assigned since the last time; it is new no more."""
        variables, new = self._variables(slots=True), Listing()
        for number, digest in take_digests(variables):
            new.add((number, digest), f"{variables[number].path}, which it has assigned")
        return new

    def _meet(self, kind: int) -> list[int]:
        self.compare_new()
        every = joint.exchange([kind], self._steps.where.mesh, self._group)
        return [one[0] for one in every]

    def _read(
        self, kinds: list[int], wanted: bool
    ) -> list[tuple[SpreadVariable, np.ndarray | None]]:
        slots = WEIGHTS_AND_SLOTS in kinds
        return [
            (one, gather(self._steps.lent.current(one), one.layout, self._group, wanted))
            for one in self._variables(slots)
            if isinstance(one, SpreadVariable)
        ]

    def _variables(self, slots: bool) -> list[keras.Variable]:
        model = self._steps.model
        optimizer = getattr(model, "optimizer", None) if slots else None
        own = [] if optimizer is None else optimizer.variables
        return list({id(one): one for one in [*model.variables, *own]}.values())
