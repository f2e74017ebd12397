"""One pass of all the replicas forwards, and one backwards, each on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.links import Links, read
from keras_multigpu.engines.tensorflow.raw import Raw
from keras_multigpu.engines.tensorflow.sync import Replica
from keras_multigpu.engines.tensorflow.template import TemplateFunction
from keras_multigpu.engines.tensorflow.tensors import (
    floats,
    gradient_order,
    map_tensors,
    substitute,
)
from keras_multigpu.engines.values import Tensor


class Passes:
    """The calls of a step, and their gradients.

    Args:
        function: the template's call.
        links: the ways of the weights to the devices, and of their gradients back.
        masked: each replica's arguments `(args, kwargs)`, and the mask of each tensor in them.
        sizes: the rows of the batch that are each replica's own.
        serial: a number of this step's own where replicas exchange statistics; else 0.
        compiled: compile the replicas with XLA.

    Attributes:
        raws: what each replica returned, on its own device; after `run`.
    """

    def __init__(
        self,
        function: TemplateFunction,
        links: Links,
        masked: Sequence[Any],
        sizes: Sequence[Any],
        serial: int,
        compiled: bool,
    ):
        self.raws: list[Raw] = []
        self._function = function
        self._links = links
        self._masked = masked
        self._sizes = sizes
        self._serial = serial
        self._compiled = compiled
        self._tapes: list[tuple[tf.GradientTape, list[Tensor]]] = []
        self._used: set[int] = set()

    def run(self) -> Iterator[Tensor]:
        """Calls the replicas; gives what gradients can come back to, on the first device."""
        sources = [*map(read, self._links.trainable), *floats(self._masked)]
        self._order = gradient_order(sources)
        if self._order:
            results = tf.custom_gradient(lambda *values: (self._forward(*values), self._backward))(
                *sources
            )
        else:
            results = self._forward(*sources)
        return (_note_use(result, place, self._used) for place, result in enumerate(results))

    def _forward(self, *sources: Tensor) -> list[Tensor]:
        links, given = self._links, iter(sources)
        # Seen by the replicas' tapes only: TensorFlow prepares the gradient's gradient for what
        # two of them see, which takes longer to trace and to run.
        hide = tf.stop_gradient if self._order == 1 else tf.identity
        weights = {id(variable): next(given) for variable in links.trainable}
        for number, (device, state) in enumerate(zip(links.devices, links.send(weights, hide))):
            replica = Replica(number, self._sizes[number], len(links.devices), self._serial)
            keys = links.trainable_of(number)
            tape = tf.GradientTape(persistent=self._order > 1)
            with tf.device(device), tape:
                call = map_tensors(hide, substitute(self._masked[number], given))
                copies = [state[key] for key in keys] + floats(call)
                if self._order:
                    tape.watch(copies)
                once = self._order == 1
                raw = self._function(list(state.values()), call, replica, self._compiled, once)
            self.raws.append(raw)
            self._tapes.append((tape, copies))
        with tf.device(links.devices[0]):
            results = [part for raw in self.raws for part in floats(raw.differentiable)]
            return [tf.identity(result) for result in results]

    def _backward(self, *upstream: Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
        arriving = enumerate(upstream)
        by_weights: list[dict[int, Tensor | None]] = []
        by_inputs: list[Tensor | None] = []
        for number, device in enumerate(self._links.devices):
            keys = self._links.trainable_of(number)
            with tf.device(device), tf.name_scope("gradients"):
                gradients = self._gradient(number, arriving)
            by_weights.append(dict(zip(keys, gradients)))
            by_inputs += gradients[len(keys) :]
        self._used.clear()
        flat = self._links.sum(by_weights) + by_inputs
        if self._order == 1:
            self._release()
        return (flat, [None] * len(variables)) if variables else flat

    def _release(self) -> None:
        """Lets go of the template, once no more gradients can be asked for.

        TensorFlow never forgets the gradient function of a graph, and with it what that holds.
        """
        del self._function, self._masked
        self.raws.clear()
        self._tapes.clear()

    def _gradient(self, number: int, arriving: Iterator[tuple[int, Tensor]]) -> list[Tensor | None]:
        """The gradient of one replica, by its copies of the weights and its inputs."""
        (tape, copies), raw = self._tapes[number], self.raws[number]
        results = floats(raw.differentiable)
        pairs = [next(arriving) for _ in results]
        is_used = [place in self._used for place, _ in pairs]
        upstream = [tf.identity(value) for place, value in pairs if place in self._used]
        results = [result for result, one_is_used in zip(results, is_used) if one_is_used]
        gradients = tape.gradient(results, copies, output_gradients=upstream)
        return [
            gradient if is_connected else None
            for gradient, is_connected in zip(gradients, raw.connected(copies, is_used))
        ]


def _note_use(result: Tensor, place: int, used: set[int]) -> Tensor:
    """The same tensor, which notes that a gradient comes back to it.

    The gradient of a function of many results is given zeros for those that no loss uses, and
    would hand on zeros where one device has none: an optimizer with weight decay tells the two
    apart.
    """

    @tf.custom_gradient
    def identity(value: Tensor) -> Any:
        def backward(upstream: Tensor) -> Tensor:
            used.add(place)
            return upstream

        return tf.identity(value), backward

    return identity(result)
