"""Sends the values of variables to the towers' replicas, and brings their gradients home.

What one replica uses and stores on its own device is not sent. The rest goes through hubs, so that
no device carries much more than the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import given_value
from keras_multigpu.engines.tensorflow.names import full_name, host_of
from keras_multigpu.engines.tensorflow.tensors import add
from keras_multigpu.engines.tensorflow.weights.hubs import Part, divide, shares_back, shares_out
from keras_multigpu.engines.tensorflow.weights.reading import dtype_of, home_of, may_train, read
from keras_multigpu.engines.tensorflow.weights.rows import add_rows, merge_rows
from keras_multigpu.engines.values import Tensor


class Exchange:
    """Sends the values of variables to the replicas that use them, and sums their gradients.

    Args:
        states: each replica's variables, in the template's order.
        devices: each replica's device.

    Attributes:
        devices: the argument.
        watched: trainable variables, and others that a tape watches.
    """

    def __init__(self, states: Sequence[Sequence[keras.Variable]], devices: Sequence[str]):
        self.devices = tuple(map(full_name, devices))
        self._variables: dict[int, keras.Variable] = {}
        self._users: dict[int, list[int]] = {}
        for replica, variables in enumerate(states):
            for variable in variables:
                self._variables[id(variable)] = variable
                self._users.setdefault(id(variable), []).append(replica)
        self.watched = [v for v in self._variables.values() if may_train(v)]
        users = [(one, self._users[key]) for key, one in self._variables.items()]
        self._routes = _find_routes(users, self.devices, set(map(id, self.watched)))

    def watched_of(self, replica: int) -> list[int]:
        """The keys of a replica's watched variables."""
        return [id(v) for v in self.watched if replica in self._users[id(v)]]

    def send(
        self, weights: Mapping[int, Tensor], hide: Callable[[Tensor], Tensor]
    ) -> list[dict[int, Tensor]]:
        """Every variable's value for each of its replicas, by the variable's `id`.

        `weights` has the values of watched variables. `hide` is applied to them before they are
        sent. The other values are read here.
        """
        # In a graph TensorFlow sends a tensor to a device once; eagerly, once for each use.
        keep = tf.identity if tf.executing_eagerly() else tf.convert_to_tensor
        states: list[dict[int, Tensor]] = [{} for _ in self.devices]
        for key, variable in self._variables.items():
            with tf.device(home_of(variable)):
                given = hide(weights[key]) if key in weights else given_value(variable)
                value = read(variable) if given is None else given
            for route in self._routes[key]:
                relayed = route.pass_on(value)
                for replica in route.replicas:
                    with tf.device(self.devices[replica]):
                        is_home = self.devices[replica] == route.home
                        arrived = value if is_home else route.join(relayed)
                        states[replica][key] = keep(tf.cast(arrived, dtype_of(variable)))
        return states

    def sum(self, gradients: Sequence[Mapping[int, Tensor | None]]) -> list[Tensor | None]:
        """Sums the replicas' gradients of every watched weight, on the weight's device."""
        with tf.name_scope("gradients"):  # reports recognize gradients by this name
            return [self._sum(gradients, variable) for variable in self.watched]

    def _sum(
        self, gradients: Sequence[Mapping[int, Tensor | None]], variable: keras.Variable
    ) -> Tensor | None:
        sums = []
        for route in self._routes[id(variable)]:
            sent: dict[str, Tensor] = {}
            for device, own in self._by_device(gradients, variable, route.replicas).items():
                with tf.device(device):
                    sent[device] = _add(own, variable)
            if sent:
                sums.append(self._on_host(sent, route, variable))
        with tf.device(home_of(variable)):
            return _add(sums, variable) if sums else None

    def _by_device(
        self,
        gradients: Sequence[Mapping[int, Tensor | None]],
        variable: keras.Variable,
        replicas: Sequence[int],
    ) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for replica in replicas:
            gradient = gradients[replica][id(variable)]
            if gradient is not None:
                found.setdefault(self.devices[replica], []).append(gradient)
        return found

    def _on_host(self, sent: dict[str, Tensor], route: _Route, variable: keras.Variable) -> Tensor:
        """Sums the gradients that a host's devices have sent."""
        if len(sent) < 2:
            return next(iter(sent.values()))
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in sent.values()):
            with tf.device(route.home if route.home in sent else next(iter(sent))):
                return _add(list(sent.values()), variable)
        return route.sum(sent)


def _add(gradients: list[Tensor], variable: keras.Variable) -> Tensor:
    """Sums gradients of replicas of the same batch: equal rows are added place by place."""
    if len(gradients) < 2 or not all(isinstance(one, tf.IndexedSlices) for one in gradients):
        return add(gradients)
    if getattr(variable, "names_rows_once", False):
        return merge_rows(add(gradients))
    return functools.reduce(add_rows, gradients)


@dataclasses.dataclass(frozen=True)
class _Route:
    """The route between a weight and its replicas on one host, through hubs.

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

    def sum(self, sent: Mapping[str, Tensor]) -> Tensor:
        """Has the hubs add the gradients of several devices, and joins the sums at home."""
        pieces = []
        for device, gradient in sent.items():
            with tf.device(device):
                pieces.append(_cut(gradient, self.back))
        sums = []
        for part, column in zip(self.back, zip(*pieces)):
            with tf.device(part.hub):
                sums.append(tf.add_n(list(column)))
        with tf.device(self.home):
            return self.join(sums)


def _find_routes(
    users: Sequence[tuple[keras.Variable, Sequence[int]]],
    devices: Sequence[str],
    watched: Collection[int],
) -> dict[int, list[_Route]]:
    """Every variable's routes, one for each host; hubs are chosen to balance the traffic.

    `users` has the replicas of each variable, `watched` the `id`s of variables with gradients.
    """
    stored = {id(variable): variable for variable, _ in users}
    groups: dict[tuple[int, ...], dict[str, list[int]]] = {}
    for variable, replicas in users:
        hosts: dict[str, list[int]] = {}
        for replica in replicas:
            hosts.setdefault(host_of(devices[replica]), []).append(replica)
        for own in hosts.values():
            homes = groups.setdefault(tuple(own), {})
            homes.setdefault(home_of(variable), []).append(id(variable))
    sizes = {key: tf.TensorShape(one.shape).num_elements() for key, one in stored.items()}
    found: dict[int, list[_Route]] = {key: [] for key in stored}
    for replicas, homes in groups.items():
        own_devices = list(dict.fromkeys(devices[replica] for replica in replicas))
        loads = {one: sum(sizes[key] for key in homes.get(one, ())) for one in own_devices}
        for home, keys in homes.items():
            trained = {key: sizes[key] for key in keys if key in watched}
            out = divide({key: sizes[key] for key in keys}, shares_out(loads, home))
            back = divide(trained, shares_back(loads, home))
            for key in keys:
                shape = tf.TensorShape(stored[key].shape)
                route = _Route(home, shape, tuple(replicas), out[key], back.get(key, ()))
                found[key].append(route)
    return found


def _cut(value: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Cuts a tensor into flat pieces; returns it unchanged if there is only one."""
    if len(parts) == 1:
        return [value]
    return tf.split(tf.reshape(value, [-1]), [part.stop - part.start for part in parts])
