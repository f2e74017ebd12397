"""The routes between the weights' homes and the replicas, through the hubs of each host.

A divided variable has a home, and so a route, for each of its parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import host_of
from keras_multigpu.engines.tensorflow.weights.divided import parts_of
from keras_multigpu.engines.tensorflow.weights.hubs import Part, divide, shares_back, shares_out
from keras_multigpu.engines.values import Tensor

_Key = tuple[int, int]  # a variable's `id`, and the number of its part


@dataclasses.dataclass(frozen=True)
class Route:
    """The route between a weight, or a part of a divided one, and its replicas on one host.

    Attributes:
        home: the device that stores it.
        shape: its shape.
        replicas: the replicas' numbers.
        out: the pieces of the weight that hubs pass on.
        back: the pieces of its gradients that hubs sum.
    """

    home: str
    shape: tf.TensorShape
    replicas: tuple[int, ...]
    out: tuple[Part, ...]
    back: tuple[Part, ...]

    def pass_on(self, value: Tensor) -> list[Tensor]:
        """The pieces of the weight, each on its hub."""
        with tf.device(self.home):
            pieces = _cut(value, self.out)
        passed = []
        for part, piece in zip(self.out, pieces):
            with tf.device(part.hub):
                passed.append(tf.identity(piece))
        return passed

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Undoes the cut into pieces."""
        return pieces[0] if len(pieces) == 1 else tf.reshape(tf.concat(pieces, 0), self.shape)

    def sum(self, sent: Mapping[str, Tensor], add: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Has the hubs `add` the gradients of several devices, and joins the sums at home."""
        pieces = []
        for device, gradient in sent.items():
            with tf.device(device):
                pieces.append(_cut(gradient, self.back))
        sums = []
        for part, column in zip(self.back, zip(*pieces)):
            with tf.device(part.hub):
                sums.append(add(list(column)))
        with tf.device(self.home):
            return self.join(sums)


def find_routes(
    users: Sequence[tuple[keras.Variable, Sequence[int]]],
    devices: Sequence[str],
    watched: Collection[int],
) -> dict[int, list[list[Route]]]:
    """Every variable's routes: a list for each part, with a route for each host.

    The hubs are chosen to balance the devices' traffic. `users` has the replicas of each variable,
    `watched` the `id`s of variables with gradients.
    """
    stored: dict[_Key, tf.Variable] = {}
    groups: dict[tuple[int, ...], dict[str, list[_Key]]] = {}
    for variable, replicas in users:
        hosts: dict[str, list[int]] = {}
        for replica in replicas:
            hosts.setdefault(host_of(devices[replica]), []).append(replica)
        for number, part in enumerate(parts_of(variable)):
            key = id(variable), number
            stored[key] = part
            for own in hosts.values():
                groups.setdefault(tuple(own), {}).setdefault(part.device, []).append(key)
    sizes = {key: part.shape.num_elements() for key, part in stored.items()}
    found: dict[int, list[list[Route]]] = {
        id(variable): [[] for _ in parts_of(variable)] for variable, _ in users
    }
    for replicas, homes in groups.items():
        own_devices = list(dict.fromkeys(devices[replica] for replica in replicas))
        loads = {one: sum(sizes[key] for key in homes.get(one, ())) for one in own_devices}
        for home, keys in homes.items():
            trained = {key: sizes[key] for key in keys if key[0] in watched}
            out = divide({key: sizes[key] for key in keys}, shares_out(loads, home))
            back = divide(trained, shares_back(loads, home))
            for key in keys:
                shape = stored[key].shape
                route = Route(home, shape, tuple(replicas), out[key], back.get(key, ()))
                found[key[0]][key[1]].append(route)
    return found


def _cut(value: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Cuts a tensor into flat pieces; returns it unchanged if there is only one."""
    if len(parts) == 1:
        return [value]
    return tf.split(tf.reshape(value, [-1]), [part.stop - part.start for part in parts])
