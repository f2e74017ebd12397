"""Sends weights to the replicas' devices, and their gradients back.

A weight goes from its variable's device, its *home*, to a hub, and from there to every device. A
gradient goes from every device to a hub, which sums, and the sum goes home. Each host has its
hubs, so a weight, and the sum of a host's gradients, crosses between two hosts once. A weight that
one replica uses and stores on its own device is not sent. Each part of a divided variable has its
own home and its own routes (`routes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import given_value
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.lookups import Table
from keras_multigpu.engines.tensorflow.weights.reading import (
    dtype_of,
    home_of,
    joined,
    may_train,
    parts_at_home,
)
from keras_multigpu.engines.tensorflow.weights.routes import Route, find_routes
from keras_multigpu.engines.tensorflow.weights.sums import Sums
from keras_multigpu.engines.values import Tensor


class Exchange:
    """Sends the values of variables to the replicas that use them, and sums their gradients.

    Args:
        states: each replica's variables, in the template's order.
        devices: each replica's device.
        wire_dtype: the type in which watched weights and their gradients are sent; `None` keeps
            their own.
        rules: how to merge gradients that are not plain sums, by the variable's `id`.
        default: how to merge the other gradients of rows; `None` concatenates them.
        peers: joined processes with more replicas; `None` if there are none.
        by_rows: the tables, by `id`, that stay where they are; replicas get none of their rows.

    Attributes:
        peers: the argument.
        watched: trainable variables, and others that a tape watches.
    """

    def __init__(
        self,
        states: Sequence[Sequence[keras.Variable]],
        devices: Sequence[str],
        wire_dtype: str | None,
        rules: Mapping[int, str],
        default: str | None = None,
        peers: Peers | None = None,
        by_rows: Collection[int] = (),
    ):
        self.peers = peers
        self._by_rows = by_rows
        self.devices = tuple(map(full_name, devices))
        self.wire_dtype = wire_dtype
        self._variables: dict[int, keras.Variable] = {}
        self._users: dict[int, list[int]] = {}
        for replica, variables in enumerate(states):
            for variable in variables:
                self._variables[id(variable)] = variable
                self._users.setdefault(id(variable), []).append(replica)
        self.watched = [v for v in self._variables.values() if may_train(v)]
        self._are_watched = set(map(id, self.watched))
        sent = self._variables.keys() - set(by_rows)
        users = [(one, self._users[key]) for key, one in self._variables.items() if key in sent]
        self._routes = find_routes(users, self.devices, self._are_watched)
        self._sums = Sums(
            self.devices, self._routes, self._wire, wire_dtype, rules, default, peers, by_rows
        )

    def watched_of(self, replica: int) -> list[int]:
        """The keys of a replica's watched variables."""
        return [id(v) for v in self.watched if replica in self._users[id(v)]]

    def tables(
        self, weights: dict[int, Tensor], hide: Callable[[Tensor], Tensor]
    ) -> dict[int, Table]:
        """The tables that stay where they are; the arguments are those of `send`."""
        found = {}
        for key in self._by_rows:
            variable = self._variables[key]
            division = division_of(variable)
            assert division is not None
            found[key] = Table(variable, division, self._parts(variable, weights, hide))
        return found

    def send(
        self, weights: dict[int, Tensor], hide: Callable[[Tensor], Tensor]
    ) -> list[dict[int, Tensor]]:
        """Every variable's value for each of its replicas, by the variable's `id`.

        `weights` has the values of watched variables. `hide` is applied to them before they are
        sent. The other values are read here.
        """
        # In a graph TensorFlow sends a tensor to a device once; eagerly, once for each use.
        keep = tf.identity if tf.executing_eagerly() else tf.convert_to_tensor
        states: list[dict[int, Tensor]] = [{} for _ in self.devices]
        for key, variable in self._variables.items():
            if key in self._by_rows:
                for replica in self._users[key]:
                    with tf.device(self.devices[replica]):
                        none = tf.zeros([0, *variable.shape[1:]], dtype_of(variable))
                        states[replica][key] = none
                continue
            values = self._parts(variable, weights, hide)
            found: dict[int, list[Tensor]] = {replica: [] for replica in self._users[key]}
            for value, routes in zip(values, self._routes[key]):
                self._send(value, routes, variable, found)
            for replica, parts in found.items():
                with tf.device(self.devices[replica]):
                    states[replica][key] = keep(
                        tf.cast(joined(parts, variable), dtype_of(variable))
                    )
        return states

    def _parts(
        self,
        variable: keras.Variable,
        weights: dict[int, Tensor],
        hide: Callable[[Tensor], Tensor],
    ) -> Sequence[Tensor]:
        key = id(variable)
        with tf.device(home_of(variable)):
            given = hide(weights[key]) if key in weights else given_value(variable)
            return parts_at_home(variable, given)

    def _send(
        self,
        value: Tensor,
        routes: Sequence[Route],
        variable: keras.Variable,
        found: dict[int, list[Tensor]],
    ) -> None:
        """Sends a weight, or a part of it, to its replicas."""
        for route in routes:
            with tf.device(route.home):
                is_sent = id(variable) in self._are_watched
                value = tf.cast(value, self._wire(variable) if is_sent else value.dtype)
            relayed = route.pass_on(value)
            for replica in route.replicas:
                with tf.device(self.devices[replica]):
                    is_home = self.devices[replica] == route.home
                    found[replica].append(value if is_home else route.join(relayed))

    def sum(
        self,
        gradients: Sequence[dict[int, Tensor | None]],
        by_tables: Mapping[int, Sequence[Sequence[Tensor]]],
    ) -> list[Tensor | None]:
        """Sums the replicas' gradients of every watched weight, on the weight's device.

        `by_tables` has the gradients of the parts of tables that stay where they are, for each
        lookup.
        """
        return self._sums.of(self.watched, gradients, by_tables)

    def _wire(self, variable: keras.Variable) -> str:
        is_sent = len(self.devices) > 1 or self.peers is not None
        return self.wire_dtype if self.wire_dtype and is_sent else dtype_of(variable)
