"""Runs the replicas of a traced call, and takes their gradients, each on its own device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.results import LocalResult, tensors_of
from keras_multigpu.engines.tensorflow.tensors import floats
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.values import Tensor

Gradients = list[Tensor | None]
Reached = Callable[[tuple[bool, ...]], list[bool]]


@dataclasses.dataclass
class Leg:
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
    reached: Reached | None

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


class Run:
    """Runs every replica of a traced call.

    Args:
        trace: the call.
        devices: each replica's device.
        order: the highest derivative that may be taken.
    """

    def __init__(self, trace: Trace, devices: Sequence[str], order: int):
        self._devices, self._order, self._trace = devices, order, trace
        self._legs: list[Leg] = []

    def forward(
        self, arguments: Sequence[Any], watched: Sequence[list[Tensor]]
    ) -> list[LocalResult]:
        """Calls every replica with its arguments, of which some tensors are watched."""
        raws = []
        for device, given, sources in zip(self._devices, arguments, watched):
            tape = tf.GradientTape(persistent=self._order > 1)
            with tf.device(device), tape:
                if self._order:
                    tape.watch(sources)
                raws.append(self._trace(*given))
            results = floats(raws[-1].differentiable)
            reached = None if tf.executing_eagerly() else self._reached(given, sources)
            self._legs.append(Leg(device, tape, sources, results, reached))
        return raws

    def backward(
        self, upstream: Sequence[Gradients], variables: Sequence[tf.Variable]
    ) -> list[Gradients]:
        """Each replica's gradients by its watched tensors, then by variables.

        `upstream` are the gradients of its results, `None` for those that no loss uses.
        """
        return [leg.gradients(one, variables) for leg, one in zip(self._legs, upstream)]

    def _reached(self, given: Any, sources: list[Tensor]) -> Reached:
        # By `id`, because `==` compares the tensors' values.
        places = {id(argument): place for place, argument in enumerate(tensors_of(given))}
        own = [places.get(id(source)) for source in sources]

        def reached(is_used: tuple[bool, ...]) -> list[bool]:
            known = self._trace.reached(is_used)
            return [place is None or known[place] for place in own]

        return reached
