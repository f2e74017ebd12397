"""Replicas on TensorFlow: the weights go out, each device calls the template, gradients come back.

The way of a weight: its variable's device -> its hub -> every device. The way of its gradient:
every device -> the hub, which sums -> the variable's device. Hubs are spread over the devices
by bytes, so that no device carries all the traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# What TensorFlow's own functions ask before they prepare for gradients; it has no public form.
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes  # noqa: TID251

from keras_multigpu.engines.base import Call, Replicas, Result, Tensor, get_mask, set_mask
from keras_multigpu.engines.tensorflow.losses import find_sums
from keras_multigpu.engines.tensorflow.sync import Replica, batch_normalizations
from keras_multigpu.engines.tensorflow.template import Raw, TemplateFunction
from keras_multigpu.engines.tensorflow.tensors import add, cast, floats, map_tensors, substitute

_serials = itertools.count(1)


class TensorFlowReplicas(Replicas):
    """One traced function, called once per device in the graph of the step."""

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        wire_dtype: str | None,
        sync_batch_norm: bool,
    ):
        self.template = template
        self.devices = tuple(devices)
        self.wire_dtype = wire_dtype
        self.sync_batch_norm = sync_batch_norm
        self.retrace()

    def retrace(self) -> None:
        layers = batch_normalizations(self.template, self.sync_batch_norm)
        self._function = TemplateFunction(self.template, layers)
        self._sums: dict[Any, list[bool]] = {}

    def run(self, calls: Sequence[Call], sizes: Sequence[Any], *, compiled: bool) -> list[Result]:
        if not self._function.layers:
            self._function.layers = batch_normalizations(self.template, self.sync_batch_norm)
        compiled = compiled and not self._function.layers  # XLA knows no collective operations
        serial = next(_serials) if self._function.layers else 0
        known = self._function.variables
        trainable = [variable for variable in known if _is_differentiable(variable)]
        masked = [(call, [get_mask(part) for part in tf.nest.flatten(call)]) for call in calls]
        raws: list[Raw] = []
        used: set[int] = set()

        sources = [*map(_read, trainable), *floats(masked)]
        order = _gradient_order(sources)

        def forward(*sources: Tensor) -> Any:
            given = iter(sources)
            weights = {id(variable): next(given) for variable in trainable}
            runs = []
            for number, (device, state) in enumerate(zip(self.devices, self._send(weights))):
                replica = Replica(number, sizes[number], len(self.devices), serial)
                tape = tf.GradientTape(persistent=order > 1)
                with tf.device(device), tape:
                    call = map_tensors(tf.identity, substitute(masked[number], given))
                    copies = [state[key] for key in weights] + floats(call)
                    if order == 1:
                        # Seen by this tape only: TensorFlow prepares the gradient's gradient
                        # for what two of them see, which takes longer to trace and to run.
                        copies = [tf.stop_gradient(copy) for copy in copies]
                        state.update(zip(weights, copies))
                        call = substitute(call, iter(copies[len(weights) :]))
                    if order:
                        tape.watch(copies)
                    raws.append(self._function(list(state.values()), call, replica, compiled))
                runs.append((device, tape, copies, raws[-1]))

            def backward(*upstream: Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
                arriving = enumerate(upstream)
                gradients = [_gradient(*run, arriving, used) for run in runs]
                used.clear()
                flat = self._sum(trainable, [one[: len(trainable)] for one in gradients])
                flat += itertools.chain(*(one[len(trainable) :] for one in gradients))
                return (flat, [None] * len(variables)) if variables else flat

            with tf.device(self.devices[0]):
                results = [part for raw in raws for part in floats(raw.differentiable)]
                return [tf.identity(result) for result in results], backward

        results = tf.custom_gradient(forward)(*sources) if order else forward(*sources)[0]
        if len(self._function.variables) != len(known):
            self.retrace()  # layers were built in this call: now their variables are known
            return self.run(calls, sizes, compiled=compiled)
        gathered = (_note_use(result, place, used) for place, result in enumerate(results))
        sums = self._find_sums(calls[0], len(raws[0].losses))
        return [self._result(raw, gathered, sums) for raw in raws]

    def _send(self, weights: dict[int, Tensor]) -> list[dict[int, Tensor]]:
        """The value of every variable on every device, by the variable's `id`.

        Args:
            weights: the trainable ones' values, by `id`; the others are read here.
        """
        states: list[dict[int, Tensor]] = [{} for _ in self.devices]
        for variable, hub in zip(self._function.variables, self._hubs()):
            key, home = id(variable), _home(variable)
            with tf.device(home):
                value = weights[key] if key in weights else _read(variable)
                value = tf.cast(value, self._wire(variable) if key in weights else value.dtype)
            with tf.device(hub):
                relayed = tf.identity(value)
            for device, state in zip(self.devices, states):
                with tf.device(device):
                    nearest = value if _same_device(device, home) else relayed
                    state[key] = tf.cast(tf.identity(nearest), variable.dtype)
        return states

    def _sum(
        self, trainable: Sequence[keras.Variable], gradients: Sequence[Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """The sum over the replicas of every weight's gradient, formed on its hub."""
        hub_of = dict(zip(map(id, self._function.variables), self._hubs()))
        sums = []
        for variable, column in zip(trainable, zip(*gradients)):
            wire = self._wire(variable)
            parts = []
            for device, gradient in zip(self.devices, column):
                if gradient is not None:
                    with tf.device(device):
                        parts.append(cast(gradient, wire))
            with tf.device(hub_of[id(variable)]):
                total = cast(add([cast(part, variable.dtype) for part in parts]), wire)
            with tf.device(_home(variable)):
                sums.append(cast(total, variable.dtype))
        return sums

    def _wire(self, variable: keras.Variable) -> str:
        return self.wire_dtype if self.wire_dtype and len(self.devices) > 1 else variable.dtype

    def _hubs(self) -> list[str]:
        """A device for each variable, such that all have about the same bytes to pass on.

        With two devices a variable's own device is the one, since nothing is gained by a relay.
        """
        if len(self.devices) <= 2:
            return [_home(variable) for variable in self._function.variables]
        load = dict.fromkeys(self.devices, 0)
        hubs = {}
        for variable in sorted(self._function.variables, key=_bytes, reverse=True):
            hub = min(self.devices, key=load.__getitem__)
            hubs[id(variable)] = hub
            load[hub] += _bytes(variable)
        return [hubs[id(variable)] for variable in self._function.variables]

    def _find_sums(self, call: Call, count: int) -> list[bool]:
        """Whether each of the losses is a sum: tried once a trace, and only where it matters."""
        if not count or len(self.devices) == 1:
            return [False] * count
        if not tf.executing_eagerly():
            return find_sums(self.template, call, count)
        key = (count, call[1].get("training"))
        if key not in self._sums:
            self._sums[key] = find_sums(self.template, call, count)
        return self._sums[key]

    def _result(self, raw: Raw, gathered: Iterator[Tensor], sums: Sequence[bool]) -> Result:
        """One replica's results, all of them on the first device."""
        outputs, losses = substitute(raw.differentiable, gathered)
        with tf.device(self.devices[0]):
            outputs, masks = map_tensors(tf.identity, (outputs, raw.masks))
        for part, mask in zip(tf.nest.flatten(outputs), masks):
            set_mask(part, mask)
        assigned = self._function.assigned
        updates = [(assigned[key], value) for key, value in raw.updates.items()]
        return Result(outputs, list(zip(losses, sums)), updates, raw.shapes)


def _gradient_order(sources: list[Tensor]) -> int:
    """How often the tapes around this call may differentiate by these: 0, 1, or 2 for more."""
    return 2 if tf.executing_eagerly() else int(PossibleTapeGradientTypes(sources))


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


def _gradient(
    device: str,
    tape: tf.GradientTape,
    copies: list[Tensor],
    raw: Raw,
    arriving: Iterator[tuple[int, Tensor]],
    used: set[int],
) -> list[Tensor | None]:
    """The gradient of one replica, on its device, by its copies of the weights and its inputs."""
    results = floats(raw.differentiable)
    pairs = [next(arriving) for _ in results]
    is_used = [place in used for place, _ in pairs]
    with tf.device(device):
        upstream = [tf.identity(value) for place, value in pairs if place in used]
        results = [result for result, one_is_used in zip(results, is_used) if one_is_used]
        gradients = tape.gradient(results, copies, output_gradients=upstream)
    return [
        gradient if is_connected else None
        for gradient, is_connected in zip(gradients, raw.connected(copies, is_used))
    ]


def _home(variable: keras.Variable) -> str:
    return variable._value.device


def _same_device(first: str, second: str) -> bool:
    return first.rpartition("/")[2] == second.rpartition("/")[2]


def _read(variable: keras.Variable) -> Tensor:
    """A variable's value, in its own type, on its own device.

    `Variable.value` would give it in the type of the layer that is being called; Keras has no
    public way round that, hence `_value`.
    """
    with tf.device(_home(variable)):
        return tf.identity(variable._value)


def _bytes(variable: keras.Variable) -> int:
    return tf.TensorShape(variable.shape).num_elements() * tf.as_dtype(variable.dtype).size


def _is_differentiable(variable: keras.Variable) -> bool:
    return variable.trainable and tf.as_dtype(variable.dtype).is_floating
