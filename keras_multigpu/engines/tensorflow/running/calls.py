"""The replicas' calls in one step, and their gradients, each on its own device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import first, full_name
from keras_multigpu.engines.tensorflow.results import Arguments, LocalResult
from keras_multigpu.engines.tensorflow.running.runs import Run
from keras_multigpu.engines.tensorflow.tensors import (
    add,
    floats,
    forget_gradient,
    gradient_order,
    is_watched,
    map_tensors,
    substitute,
)
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.tensorflow.weights.exchange import Exchange
from keras_multigpu.engines.tensorflow.weights.reading import has_link, read, source
from keras_multigpu.engines.values import Tensor


class ReplicaCalls:
    """Calls the replicas, and computes their gradients.

    Attributes:
        raws: each replica's results, on its own device; filled by `run`.
    """

    def __init__(self, trace: Trace, exchange: Exchange, calls: Sequence[Arguments]):
        self.raws: list[LocalResult] = []
        self._trace = trace
        self._exchange = exchange
        self._calls = calls
        # Outside of a graph all tapes are seen: gradients that none asks for are not computed.
        asked = [is_watched(one) for one in floats(calls)] if tf.executing_eagerly() else None
        self._asked = asked or [True] * len(floats(calls))
        self._used: set[int] = set()
        self._with_gradients: list[Tensor] = []

    def run(self) -> Iterator[Tensor]:
        """Calls the replicas; returns the results that can get gradients, on the first device."""
        sources = [*map(source, self._exchange.watched), *floats(self._calls)]
        self._order = gradient_order(sources)
        if self._order > 1:  # the gradients of gradients need the values
            sources = [*map(read, self._exchange.watched), *floats(self._calls)]
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
        exchange, given = self._exchange, iter(sources)
        # Hidden from outer tapes: for a value that two tapes watch, TensorFlow also builds second
        # derivatives, which take longer to trace and to run.
        hide = tf.stop_gradient if self._order == 1 else tf.identity
        values = [(variable, next(given)) for variable in exchange.watched]
        is_linked = has_link if self._order < 2 else lambda variable: False
        weights = {id(variable): value for variable, value in values if not is_linked(variable)}
        states = exchange.send(weights, hide)
        arguments, watched, asked = [], [], iter(self._asked)
        for number, (device, state) in enumerate(zip(exchange.devices, states)):
            with tf.device(device):
                own = functools.partial(_with_own_memory, device=device)
                call = map_tensors(hide, map_tensors(own, substitute(self._calls[number], given)))
                arguments.append((list(state.values()), call, tf.constant(number)))
            inputs = [one for one in floats(call) if next(asked)]
            watched.append([state[key] for key in exchange.watched_of(number)] + inputs)
        trace = self._trace
        self._run = Run(trace, exchange.devices, self._order)
        self.raws += self._run.forward(arguments, watched)
        with tf.device(exchange.devices[0]):
            results = [part for raw in self.raws for part in floats(raw.differentiable)]
            return [tf.identity(result) for result in results]

    def _backward(self, *upstream: Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
        """The gradients by the sources, and by any `tf.Variable`s that `call` uses."""
        arriving = (one if place in self._used else None for place, one in enumerate(upstream))
        by_weights: list[dict[int, Tensor | None]] = []
        by_asked: list[Tensor | None] = []
        by_others: list[list[Tensor]] = [[] for _ in variables]
        results = [[next(arriving) for _ in floats(raw.differentiable)] for raw in self.raws]
        for number, gradients in enumerate(self._run.backward(results, variables)):
            keys = self._exchange.watched_of(number)
            count = len(gradients) - len(variables)
            by_weights.append(dict(zip(keys, gradients)))
            by_asked += gradients[len(keys) : count]
            for found, gradient in zip(by_others, gradients[count:]):
                found += [] if gradient is None else [gradient]
        self._used.clear()
        inputs = iter(by_asked)
        by_inputs = [next(inputs) if is_asked else None for is_asked in self._asked]
        flat = self._exchange.sum(by_weights) + by_inputs
        # A user's own function may build its gradient, in another graph, more than once.
        if self._order == 1 and self._with_gradients[0].graph is tf.compat.v1.get_default_graph():
            self._release()
        if not variables:
            return flat
        return flat, [add(found) for found in by_others]

    def _release(self) -> None:
        """Frees the template once no more gradients can be asked for.

        TensorFlow keeps a graph's gradient functions forever, and whatever they refer to.
        """
        del self._trace, self._calls, self._exchange, self._run
        self.raws.clear()
        for result in self._with_gradients:
            forget_gradient(result)
        self._with_gradients.clear()


def _with_own_memory(tensor: Tensor, device: str) -> Tensor:
    """A slice, or a copy of it where it stays in the host's memory.

    TensorFlow may compute in the memory of a slice that nothing else needs. Of a batch from
    `tf.data.Dataset.from_generator`, that is the memory of the array which the generator has.
    """
    is_on_host = ":CPU:" in device or tensor.dtype == tf.int32
    if tf.executing_eagerly() or not is_on_host or tensor.shape.rank == 0:
        return tensor
    with tf.device(full_name(first("cpu"))):
        return tf.roll(tensor, 0, 0)


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
