"""The replicas' calls in one step, and their gradients, each on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.exchange import Exchange, read
from keras_multigpu.engines.tensorflow.results import Arguments, LocalResult
from keras_multigpu.engines.tensorflow.sync import Replica
from keras_multigpu.engines.tensorflow.tensors import (
    add,
    floats,
    forget_gradient,
    gradient_order,
    map_tensors,
    substitute,
)
from keras_multigpu.engines.tensorflow.trace import Trace
from keras_multigpu.engines.values import Tensor


class ReplicaCalls:
    """Calls the replicas, and computes their gradients; `sizes` are the replicas' row counts.

    Attributes:
        raws: each replica's results, on its own device; filled by `run`.
    """

    def __init__(
        self, trace: Trace, links: Exchange, calls: Sequence[Arguments], sizes: Sequence[Any]
    ):
        self.raws: list[LocalResult] = []
        self._trace = trace
        self._links = links
        self._calls = calls
        self._sizes = sizes
        self._tapes: list[tuple[tf.GradientTape, list[Tensor]]] = []
        self._used: set[int] = set()
        self._with_gradients: list[Tensor] = []

    def run(self) -> Iterator[Tensor]:
        """Calls the replicas; returns the results that can get gradients, on the first device."""
        sources = [*map(read, self._links.watched), *floats(self._calls)]
        self._order = gradient_order(sources)
        if not self._order:
            # TensorFlow never forgets a graph that has custom gradients.
            return iter(self._forward(*sources))
        results = tf.custom_gradient(lambda *values: (self._forward(*values), self._backward))(
            *sources
        )
        noted = [_note_use(result, place, self._used) for place, result in enumerate(results)]
        self._with_gradients = [*results[:1], *noted]
        return iter(noted)

    def _forward(self, *sources: Tensor) -> list[Tensor]:
        links, given = self._links, iter(sources)
        # Hidden from outer tapes: for a value that two tapes watch, TensorFlow also builds second
        # derivatives, which take longer to trace and to run.
        hide = tf.stop_gradient if self._order == 1 else tf.identity
        weights = {id(variable): next(given) for variable in links.watched}
        for number, (device, state) in enumerate(zip(links.devices, links.send(weights, hide))):
            replica = Replica(number, self._sizes[number], len(links.devices))
            keys = links.watched_of(number)
            tape = tf.GradientTape(persistent=self._order > 1)
            with tf.device(device), tape:
                call = map_tensors(hide, substitute(self._calls[number], given))
                copies = [state[key] for key in keys] + floats(call)
                if self._order:
                    tape.watch(copies)
                raw = self._trace(list(state.values()), call, replica)
            self.raws.append(raw)
            self._tapes.append((tape, copies))
        with tf.device(links.devices[0]):
            results = [part for raw in self.raws for part in floats(raw.differentiable)]
            return [tf.identity(result) for result in results]

    def _backward(self, *upstream: Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
        """The gradients by the sources, and by any `tf.Variable`s that `call` uses."""
        arriving = enumerate(upstream)
        by_weights: list[dict[int, Tensor | None]] = []
        by_inputs: list[Tensor | None] = []
        by_others: list[list[Tensor]] = [[] for _ in variables]
        for number, device in enumerate(self._links.devices):
            keys = self._links.watched_of(number)
            count = len(self._tapes[number][1])
            with tf.device(device), tf.name_scope("gradients"):
                gradients = self._gradient(number, arriving, variables)
            by_weights.append(dict(zip(keys, gradients)))
            by_inputs += gradients[len(keys) : count]
            for found, gradient in zip(by_others, gradients[count:]):
                found += [] if gradient is None else [gradient]
        self._used.clear()
        flat = self._links.sum(by_weights) + by_inputs
        if self._order == 1:
            self._release()
        return (flat, [add(found) for found in by_others]) if variables else flat

    def _release(self) -> None:
        """Frees the template once no more gradients can be asked for.

        TensorFlow keeps a graph's gradient functions forever, and whatever they refer to.
        """
        del self._trace, self._calls, self._links, self._sizes
        self.raws.clear()
        self._tapes.clear()
        for result in self._with_gradients:
            forget_gradient(result)
        self._with_gradients.clear()

    def _gradient(
        self,
        number: int,
        arriving: Iterator[tuple[int, Tensor]],
        variables: Sequence[tf.Variable],
    ) -> list[Tensor | None]:
        """One replica's gradients by its copies of the weights, its inputs, and variables."""
        (tape, copies), raw = self._tapes[number], self.raws[number]
        results = floats(raw.differentiable)
        pairs = [next(arriving) for _ in results]
        is_used = [place in self._used for place, _ in pairs]
        upstream = [tf.identity(value) for place, value in pairs if place in self._used]
        results = [result for result, one_is_used in zip(results, is_used) if one_is_used]
        sources = [*copies, *variables]
        gradients = tape.gradient(results, sources, output_gradients=upstream)
        if raw.arguments is None or all(is_used):
            return gradients
        # By `id`, because `==` compares the tensors' values.
        places = {id(argument): place for place, argument in enumerate(raw.arguments)}
        reached = self._trace.reached(tuple(is_used))
        return [
            None if id(source) in places and not reached[places[id(source)]] else gradient
            for source, gradient in zip(sources, gradients)
        ]


def _note_use(result: Tensor, place: int, used: set[int]) -> Tensor:
    """An identity that notes whether a gradient comes back.

    For results that no loss uses, a traced function returns zeros where one device has no gradient.
    Optimizers with weight decay or momentum treat the two differently.
    """

    @tf.custom_gradient
    def identity(value: Tensor) -> Any:
        def backward(upstream: Tensor) -> Tensor:
            used.add(place)
            return upstream

        return tf.identity(value), backward

    return identity(result)
