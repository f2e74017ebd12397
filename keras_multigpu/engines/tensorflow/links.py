"""The ways of the weights to the replicas' devices, and of their gradients back.

The way of a weight: its variable's device -> its hub -> every device. The way of its gradient:
every device -> the hub, which sums -> the variable's device. Hubs are spread over the devices
by bytes, so that no device carries all the traffic. A weight of one replica only, on that
replica's device, goes nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import same_device
from keras_multigpu.engines.tensorflow.rows import merge_rows
from keras_multigpu.engines.tensorflow.tensors import add, cast
from keras_multigpu.engines.values import Tensor


class Links:
    """The links between variables and the replicas that use them.

    Args:
        states: each replica's variables, in the order of the template's.
        devices: each replica's device.
        wire_dtype: the type in which trainable weights and their gradients cross between
            devices, `None` for their own.

    Attributes:
        trainable: the variables by which gradients are taken.
    """

    def __init__(
        self,
        states: Sequence[Sequence[keras.Variable]],
        devices: Sequence[str],
        wire_dtype: str | None,
    ):
        self.devices = tuple(devices)
        self.wire_dtype = wire_dtype
        self._variables: dict[int, keras.Variable] = {}
        self._users: dict[int, list[int]] = {}
        for replica, variables in enumerate(states):
            for variable in variables:
                self._variables[id(variable)] = variable
                self._users.setdefault(id(variable), []).append(replica)
        self._hubs = self._choose_hubs()
        self.trainable = [v for v in self._variables.values() if _is_differentiable(v)]

    def trainable_of(self, replica: int) -> list[int]:
        """The keys of a replica's trainable variables."""
        return [id(v) for v in self.trainable if replica in self._users[id(v)]]

    def send(self, weights: dict[int, Tensor]) -> list[dict[int, Tensor]]:
        """The value of every variable on the devices of its replicas, by the variable's `id`.

        Args:
            weights: the trainable ones' values, by `id`; the others are read here.
        """
        states: list[dict[int, Tensor]] = [{} for _ in self.devices]
        for key, variable in self._variables.items():
            home = _home(variable)
            with tf.device(home):
                value = weights[key] if key in weights else read(variable)
                value = tf.cast(value, self._wire(variable) if key in weights else value.dtype)
            with tf.device(self._hubs[key]):
                relayed = tf.identity(value)
            for replica in self._users[key]:
                device = self.devices[replica]
                with tf.device(device):
                    nearest = value if same_device(device, home) else relayed
                    states[replica][key] = tf.cast(tf.identity(nearest), dtype_of(variable))
        return states

    def sum(self, gradients: Sequence[dict[int, Tensor | None]]) -> list[Tensor | None]:
        """The sum over the replicas of every trainable weight's gradient, formed on its hub.

        Args:
            gradients: each replica's, by the variable's `id`.
        """
        with tf.name_scope("gradients"):  # so that reports tell them
            return [self._sum(gradients, variable) for variable in self.trainable]

    def _sum(
        self, gradients: Sequence[dict[int, Tensor | None]], variable: keras.Variable
    ) -> Tensor | None:
        key, wire = id(variable), self._wire(variable)
        parts = []
        for replica in self._users[key]:
            gradient = gradients[replica][key]
            if gradient is not None:
                with tf.device(self.devices[replica]):
                    parts.append(cast(gradient, wire))
        with tf.device(self._hubs[key]):
            total = add([cast(part, dtype_of(variable)) for part in parts])
            if len(parts) > 1 and getattr(variable, "names_rows_once", False):
                total = merge_rows(total)
            total = cast(total, wire)
        with tf.device(_home(variable)):
            return cast(total, dtype_of(variable))

    def _wire(self, variable: keras.Variable) -> str:
        return self.wire_dtype if self.wire_dtype and len(self.devices) > 1 else dtype_of(variable)

    def _choose_hubs(self) -> dict[int, str]:
        """A device for each variable, such that all have about the same bytes to pass on.

        For two devices a variable's own device is the one, since nothing is gained by a relay.
        """
        load = dict.fromkeys(self.devices, 0)
        hubs = {}
        for variable in sorted(self._variables.values(), key=_bytes, reverse=True):
            key = id(variable)
            devices = list(dict.fromkeys(self.devices[replica] for replica in self._users[key]))
            if len(devices) <= 2:
                hubs[key] = _home(variable)
            else:
                hubs[key] = min(devices, key=load.__getitem__)
                load[hubs[key]] += _bytes(variable)
        return hubs


def read(variable: keras.Variable) -> Tensor:
    """A variable's value, in its own type, on its own device.

    `Variable.value` would give it in the type of the layer that is being called; Keras has no
    public way round that, hence `_value`.
    """
    with tf.device(_home(variable)):
        return tf.identity(variable._value)


def dtype_of(variable: keras.Variable) -> str:
    """A variable's own type.

    `Variable.dtype` would be that of the layer which is being called, under mixed precision.
    """
    return variable._value.dtype.name


def _home(variable: keras.Variable) -> str:
    return variable._value.device


def _bytes(variable: keras.Variable) -> int:
    return tf.TensorShape(variable.shape).num_elements() * tf.as_dtype(dtype_of(variable)).size


def _is_differentiable(variable: keras.Variable) -> bool:
    return variable.trainable and tf.as_dtype(dtype_of(variable)).is_floating
