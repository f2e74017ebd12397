"""Sends weights to the replicas' devices, and their gradients back.

A weight goes from its variable's device, its *home*, to a hub, and from there to every device. A
gradient goes from every device to a hub, which sums, and the sum goes home. Each host has its
hubs, so a weight, and the sum of a host's gradients, crosses between two hosts once. A weight that
one replica uses and stores on its own device is not sent. Each part of a divided variable has its
own home and its own routes (`routes.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.kinds import ROWS, SAME, combine
from keras_multigpu.engines.shared import given_value
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.tensors import add, cast, is_watched, to_dense
from keras_multigpu.engines.tensorflow.weights.divided import DividedVariable, division_of, parts_of
from keras_multigpu.engines.tensorflow.weights.lookups import Table, join_rows
from keras_multigpu.engines.tensorflow.weights.routes import Route, find_routes
from keras_multigpu.engines.tensorflow.weights.rows import add_rows, merge_rows
from keras_multigpu.engines.values import Tensor

ONCE = "once"
"""The rule for a gradient in which each row occurs once, however often the batch uses it."""
LIKE = "like"
"""The rule for replicas of the same batch: equal rows are added place by place."""


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
        self._rules, self._default = rules, default
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
                        tf.cast(_whole(parts, variable), dtype_of(variable))
                    )
        return states

    def _parts(
        self,
        variable: keras.Variable,
        weights: dict[int, Tensor],
        hide: Callable[[Tensor], Tensor],
    ) -> Sequence[Tensor]:
        key = id(variable)
        with tf.device(_home(variable)):
            given = hide(weights[key]) if key in weights else given_value(variable)
            return _parts(variable, given)

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
        with tf.name_scope("gradients"):  # reports recognize gradients by this name
            sums = [
                self._of_table(by_tables.get(id(variable), ()), variable)
                if id(variable) in self._by_rows
                else self._sum(gradients, variable)
                for variable in self.watched
            ]
            if self.peers is not None:
                sums = self._sum_over_processes(sums, self.peers)
            return [self._finish(total, variable) for total, variable in zip(sums, self.watched)]

    def _of_table(
        self, lookups: Sequence[Sequence[Tensor]], variable: keras.Variable
    ) -> Tensor | None:
        """Adds the gradients of a table's parts, each on its device, and joins them."""
        division = division_of(variable)
        if not lookups or division is None:
            return None
        parts = []
        for device, found in zip(division.devices, zip(*lookups)):
            with tf.device(device):
                parts.append(self._add(list(found), variable))
        with tf.device(_home(variable)):
            return join_rows(parts, division)

    def _sum(
        self, gradients: Sequence[dict[int, Tensor | None]], variable: keras.Variable
    ) -> Tensor | None:
        routes, division = self._routes[id(variable)], division_of(variable)
        # On each host; the routes of all parts have the same replicas.
        sent = [self._sum_on_devices(gradients, variable, one.replicas) for one in routes[0]]
        found = [gradient for own in sent for gradient in own.values()]
        has_rows = any(isinstance(gradient, tf.IndexedSlices) for gradient in found)
        if not found or not division or has_rows or id(variable) in self._rules:
            return self._sum_over_hosts(sent, routes[0], variable)
        pieces: list[list[dict[str, Tensor]]] = [[{} for _ in sent] for _ in routes]
        for host, own in enumerate(sent):
            for device, gradient in own.items():
                with tf.device(device):
                    for number, piece in enumerate(division.split(gradient)):
                        pieces[number][host][device] = piece
        parts = [self._sum_over_hosts(*pair, variable) for pair in zip(pieces, routes)]
        with tf.device(_home(variable)):
            return _whole(parts, variable)

    def _sum_over_hosts(
        self, sent: Sequence[dict[str, Tensor]], routes: Sequence[Route], variable: keras.Variable
    ) -> Tensor | None:
        """Sums at home what the devices of each host have `sent`."""
        dtype = dtype_of(variable)
        sums = [self._sum_on_host(own, route, variable) for own, route in zip(sent, routes) if own]
        with tf.device(routes[0].home):
            return self._add([cast(part, dtype) for part in sums], variable)

    def _sum_over_processes(
        self, sums: Sequence[Tensor | None], peers: Peers
    ) -> list[Tensor | None]:
        """Sums what each process has summed; merges what is not a plain sum by its rule."""
        are_plain = [
            not isinstance(one, tf.IndexedSlices) and id(variable) not in self._rules
            for one, variable in zip(sums, self.watched)
        ]
        plain = peers.sum(
            [one if is_plain else None for one, is_plain in zip(sums, are_plain)], self.wire_dtype
        )
        found = []
        for one, total, is_plain, variable in zip(sums, plain, are_plain, self.watched):
            if is_plain or one is None:
                found.append(total)
                continue
            with tf.device(_home(variable)):
                sent = cast(one, self._wire(variable))
            every = peers.of_processes(tf.nest.flatten(sent, expand_composites=True))
            with tf.device(_home(variable)):
                parts = [cast(_like(sent, part), dtype_of(variable)) for part in every]
                found.append(self._add(parts, variable))
        return found

    def _finish(self, total: Tensor | None, variable: keras.Variable) -> Tensor | None:
        # Replicas may send only the touched rows although the optimizer wants a dense gradient.
        is_table = isinstance(total, tf.IndexedSlices) and id(variable) not in self._by_rows
        if not is_table or getattr(variable, "names_rows_once", None) is not False:
            return total
        division = division_of(variable)
        with tf.device(_home(variable)):
            pieces = [total] if division is None else division.split(total)
        parts = []
        for piece, part in zip(pieces, parts_of(variable)):
            with tf.device(part.device):
                parts.append(to_dense(piece, part.shape[0]))
        with tf.device(_home(variable)):
            return _whole(parts, variable)

    def _sum_on_host(
        self, sent: dict[str, Tensor], route: Route, variable: keras.Variable
    ) -> Tensor:
        """Sums the gradients that a host's devices have sent, in the wire type."""
        if len(sent) < 2:
            return next(iter(sent.values()))
        wire, dtype, home = self._wire(variable), dtype_of(variable), route.home
        has_rows = any(isinstance(gradient, tf.IndexedSlices) for gradient in sent.values())
        if has_rows or id(variable) in self._rules:
            with tf.device(home if home in sent else next(iter(sent))):
                total = self._add([cast(one, dtype) for one in sent.values()], variable)
                return cast(total, wire)
        return route.sum(
            sent, lambda found: tf.cast(tf.add_n([tf.cast(one, dtype) for one in found]), wire)
        )

    def _sum_on_devices(
        self,
        gradients: Sequence[dict[int, Tensor | None]],
        variable: keras.Variable,
        replicas: Sequence[int],
    ) -> dict[str, Tensor]:
        """Sums a gradient over each device's `replicas`, on that device, in the wire type."""
        found: dict[str, list[Tensor]] = {}
        for replica in replicas:
            gradient = gradients[replica][id(variable)]
            if gradient is not None:
                found.setdefault(self.devices[replica], []).append(gradient)
        sums = {}
        for device, own in found.items():
            with tf.device(device):
                sums[device] = cast(self._add(own, variable), self._wire(variable))
        return sums

    def _add(self, gradients: list[Tensor], variable: keras.Variable) -> Tensor | None:
        """Sums replicas' gradients, or merges them by the weight's rule."""
        rule = self._rules.get(id(variable), self._default)
        if len(gradients) < 2 or (rule in (None, ROWS) and not _names_rows_once(variable)):
            return add(gradients)
        if id(variable) in self._rules and variable.overwrite_with_gradient:
            return combine(self._rules[id(variable)], gradients, ())
        if not all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            return add(gradients)
        if rule == LIKE and not _names_rows_once(variable):
            return functools.reduce(add_rows, gradients)
        if rule == SAME:
            rows, shape = gradients[0].indices, gradients[0].dense_shape
            checks = [tf.debugging.assert_equal(one.indices, rows) for one in gradients[1:]]
            with tf.control_dependencies([check for check in checks if check is not None]):
                return tf.IndexedSlices(tf.add_n([one.values for one in gradients]), rows, shape)
        return merge_rows(add(gradients))

    def _wire(self, variable: keras.Variable) -> str:
        is_sent = len(self.devices) > 1 or self.peers is not None
        return self.wire_dtype if self.wire_dtype and is_sent else dtype_of(variable)


def _like(gradient: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Another process's gradient, from its tensors."""
    if not isinstance(gradient, tf.IndexedSlices):
        return parts[0]
    return tf.IndexedSlices(parts[0], parts[1], gradient.dense_shape)


def _names_rows_once(variable: keras.Variable) -> bool:
    return getattr(variable, "names_rows_once", False)


def _parts(variable: keras.Variable, value: Tensor | None) -> Sequence[Tensor]:
    """The value of each part of a variable, at its home; of the whole, if it is not divided."""
    stored_as, division = variable._value, division_of(variable)
    if division is None:
        return [read(variable) if value is None else value]
    assert isinstance(stored_as, DividedVariable)
    return stored_as.read_parts() if value is None else division.split(value)


def _whole(parts: Sequence[Tensor], variable: keras.Variable) -> Tensor:
    """A value of its parts."""
    division = division_of(variable)
    return parts[0] if division is None else tf.concat(parts, division.axis)


def read(variable: keras.Variable) -> Tensor:
    """A variable's value, or the one that `stateless_call` was given, on the variable's device.

    In the variable's own type: `Variable.value` casts to that of the calling layer.
    """
    given = given_value(variable)
    with tf.device(_home(variable)):
        return stored(variable) if given is None else tf.cast(given, dtype_of(variable))


def source(variable: keras.Variable) -> Tensor:
    """What tapes watch of a variable: its value, or the link of a divided one."""
    if not has_link(variable):
        return read(variable)
    with tf.device(_home(variable)):
        return tf.identity(variable._value.link)


def has_link(variable: keras.Variable) -> bool:
    """Whether tapes watch a variable's link in place of its value."""
    return isinstance(variable._value, DividedVariable) and given_value(variable) is None


def stored(variable: keras.Variable) -> Tensor:
    """The value that is stored in a variable, in its own type, on its own device."""
    with tf.device(_home(variable)):
        return tf.identity(variable._value)


def dtype_of(variable: keras.Variable) -> str:
    """A variable's own type; under mixed precision `Variable.dtype` is the calling layer's."""
    return variable._value.dtype.name


def _home(variable: keras.Variable) -> str:
    return variable._value.device


def may_train(variable: keras.Variable) -> bool:
    """Whether a tape may differentiate by a variable."""
    is_float = tf.as_dtype(dtype_of(variable)).is_floating
    return is_float and (variable.trainable or is_watched(source(variable)))
