"""Replicas on TensorFlow: the weights go out, each device calls the template, gradients come back.

The way of a weight: its variable's device -> its hub -> every device. The way of its gradient:
every device -> the hub, which sums -> the variable's device. Hubs are spread over the devices
by bytes, so that no device carries all the traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.base import Call, Replicas, Result, Tensor, get_mask, set_mask
from keras_multigpu.engines.tensorflow_losses import find_sums

_SEED = "seed_generator_state"
# Added to the seed of replica i, i times: the golden ratio of 2^32 keeps the seeds apart.
_SEED_STEP = 0x9E3779B9


class TensorFlowReplicas(Replicas):
    """One traced function, called once per device in the graph of the step."""

    def __init__(self, template: keras.Model, devices: Sequence[str], wire_dtype: str | None):
        self.template = template
        self.devices = tuple(devices)
        self.wire_dtype = wire_dtype
        self.retrace()

    @property
    def _variables(self) -> list[keras.Variable]:
        """The template's variables, each once."""
        return list({id(variable): variable for variable in self.template.variables}.values())

    def retrace(self) -> None:
        self._functions: dict[bool, Any] = {}
        self._assigned: dict[str, keras.Variable] = {}
        self._sums: dict[Any, list[bool]] = {}

    def run(self, calls: Sequence[Call], *, compiled: bool) -> list[Result]:
        trainable = [v for v in self._variables if _is_differentiable(v)]
        masked = [(call, [get_mask(part) for part in tf.nest.flatten(call)]) for call in calls]
        raw: list[dict[str, Any]] = []

        @tf.custom_gradient
        def forward(*sources: Tensor) -> Any:
            given = iter(sources)
            weights = {id(variable): next(given) for variable in trainable}
            runs = []
            for number, (device, state) in enumerate(zip(self.devices, self._send(weights))):
                with tf.device(device), tf.GradientTape() as tape:
                    call = _map_tensors(tf.identity, _substitute(masked[number], given))
                    copies = [state[key] for key in weights] + _floats(call)
                    tape.watch(copies)
                    raw.append(self._call(list(state.values()), call, number, compiled))
                runs.append((device, tape, copies, _floats(_differentiable(raw[-1]))))

            def backward(*upstream: Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
                arriving = iter(upstream)
                gradients = []
                for device, tape, copies, results in runs:
                    with tf.device(device):
                        arrived = [tf.identity(next(arriving)) for _ in results]
                        gradients.append(tape.gradient(results, copies, output_gradients=arrived))
                flat = self._sum(trainable, [one[: len(trainable)] for one in gradients])
                flat += itertools.chain(*(one[len(trainable) :] for one in gradients))
                return (flat, [None] * len(variables)) if variables else flat

            with tf.device(self.devices[0]):
                return [tf.identity(value) for run in runs for value in run[-1]], backward

        gathered = iter(forward(*map(_read, trainable), *_floats(masked)))
        sums = self._find_sums(calls[0], len(raw[0]["losses"]))
        return [self._result(one, gathered, sums) for one in raw]

    def _send(self, weights: dict[int, Tensor]) -> list[dict[int, Tensor]]:
        """The value of every variable on every device, by the variable's `id`.

        Args:
            weights: the trainable ones' values, by `id`; the others are read here.
        """
        states: list[dict[int, Tensor]] = [{} for _ in self.devices]
        for variable, hub in zip(self._variables, self._hubs()):
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
        hub_of = dict(zip(map(id, self._variables), self._hubs()))
        sums = []
        for variable, column in zip(trainable, zip(*gradients)):
            wire = self._wire(variable)
            parts = []
            for device, gradient in zip(self.devices, column):
                if gradient is not None:
                    with tf.device(device):
                        parts.append(_cast(gradient, wire))
            with tf.device(hub_of[id(variable)]):
                total = _cast(_add([_cast(part, variable.dtype) for part in parts]), wire)
            with tf.device(_home(variable)):
                sums.append(_cast(total, variable.dtype))
        return sums

    def _wire(self, variable: keras.Variable) -> str:
        return self.wire_dtype if self.wire_dtype and len(self.devices) > 1 else variable.dtype

    def _hubs(self) -> list[str]:
        """A device for each variable, such that all have about the same bytes to pass on.

        With two devices a variable's own device is the one, since nothing is gained by a relay.
        """
        if len(self.devices) <= 2:
            return [_home(variable) for variable in self._variables]
        load = dict.fromkeys(self.devices, 0)
        hubs = {}
        for variable in sorted(self._variables, key=_bytes, reverse=True):
            hub = min(self.devices, key=load.__getitem__)
            hubs[id(variable)] = hub
            load[hub] += _bytes(variable)
        return [hubs[id(variable)] for variable in self._variables]

    def _call(self, state: list[Tensor], call: Any, number: int, compiled: bool) -> dict[str, Any]:
        """Calls the template once, on the device of the current scope."""
        if tf.executing_eagerly():
            return self._replica(state, call, tf.constant(number), ())
        # A part of the key of the trace: a layer may behave otherwise when frozen.
        flags = tuple(variable.trainable for variable in self._variables)
        if compiled not in self._functions:
            self._functions[compiled] = tf.function(
                self._replica, autograph=False, jit_compile=compiled or None
            )
        state_spec = [tf.TensorSpec(value.shape, value.dtype) for value in state]
        call_spec = tf.nest.map_structure(_for_any_rows, call)
        with tf.device(None):
            function = self._functions[compiled].get_concrete_function(
                state_spec, call_spec, tf.TensorSpec([], tf.int32), flags
            )
        return function(state, call, tf.constant(number), flags)

    def _replica(
        self, state: list[Tensor], call: Any, number: Tensor, flags: Any
    ) -> dict[str, Any]:
        """The template's call as a function of its state: traced once for all the devices."""
        inputs, masks = call
        for part, mask in zip(tf.nest.flatten(inputs), masks):
            set_mask(part, mask)
        args, kwargs = inputs
        with _ReplicaScope(zip(self._variables, state), number) as scope:
            outputs = self.template(*args, **kwargs)
        updates = {}
        for variable in scope.assigned.values():
            key = str(id(variable))
            self._assigned[key] = variable
            updates[key] = scope.get_current_value(variable)
        return {
            "outputs": outputs,
            "masks": [get_mask(part) for part in tf.nest.flatten(outputs)],
            "losses": list(scope.losses),
            "updates": updates,
        }

    def _find_sums(self, call: Call, count: int) -> list[bool]:
        """Whether each of the losses is a sum: tried once, and only where it matters."""
        if not count or len(self.devices) == 1:
            return [False] * count
        key = (count, call[1].get("training"))
        if key not in self._sums:
            self._sums[key] = find_sums(self.template, call, count)
        return self._sums[key]

    def _result(
        self, raw: dict[str, Any], gathered: Iterator[Tensor], sums: Sequence[bool]
    ) -> Result:
        """One replica's results, all of them on the first device."""
        outputs, losses = _substitute(_differentiable(raw), gathered)
        with tf.device(self.devices[0]):
            outputs, masks = _map_tensors(tf.identity, (outputs, raw["masks"]))
        for part, mask in zip(tf.nest.flatten(outputs), masks):
            set_mask(part, mask)
        updates = [(self._assigned[key], value) for key, value in raw["updates"].items()]
        return Result(outputs, list(zip(losses, sums)), updates)


class _ReplicaScope(keras.StatelessScope):
    """A stateless scope with a replica's own random numbers and a record of what is assigned."""

    def __init__(self, state: Iterable[tuple[keras.Variable, Tensor]], index: Tensor):
        super().__init__(state_mapping=list(state), collect_losses=True)
        self._index = index
        self._seeded: set[int] = set()
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if variable.name == _SEED and id(variable) not in self._seeded:
            # The template's own generators are mapped; Keras's global one is met here first.
            self._seeded.add(id(variable))
            value = tf.identity(variable._value) if value is None else value
            shift = tf.cast(self._index, value.dtype) * tf.constant(_SEED_STEP, value.dtype)
            value += tf.stack([shift, tf.zeros_like(shift)])
            self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


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


def _differentiable(raw: dict[str, Any]) -> Any:
    return raw["outputs"], raw["losses"]


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _is_differentiable(variable: keras.Variable) -> bool:
    return variable.trainable and tf.as_dtype(variable.dtype).is_floating


def _floats(structure: Any) -> list[Tensor]:
    return [part for part in tf.nest.flatten(structure, expand_composites=True) if _is_float(part)]


def _substitute(structure: Any, floats: Iterator[Tensor]) -> Any:
    """The structure with its floating-point tensors replaced, in order."""
    return _map_tensors(lambda part: next(floats) if _is_float(part) else part, structure)


def _map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The structure with a function applied to its tensors, and to the parts of sparse ones."""
    return tf.nest.map_structure(
        lambda part: function(part) if tf.is_tensor(part) else part,
        structure,
        expand_composites=True,
    )


def _for_any_rows(value: Any) -> Any:
    """A tensor's type without the number of its rows; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    spec = tf.type_spec_from_value(value)
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _cast(value: Tensor | None, dtype: str) -> Tensor | None:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return None if value is None else tf.cast(value, dtype)


def _add(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum of dense gradients, or all the rows of sparse ones; `None` of none."""
    if not parts:
        return None
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        values = tf.concat([part.values for part in parts], axis=0)
        indices = tf.concat([part.indices for part in parts], axis=0)
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])
