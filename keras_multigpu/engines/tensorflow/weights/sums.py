"""Sums the replicas' gradients: on each device, on each host's hub, at home, over processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.kinds import ROWS, SAME, combine
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.tensors import add, cast, to_dense
from keras_multigpu.engines.tensorflow.weights.divided import division_of, parts_of
from keras_multigpu.engines.tensorflow.weights.lookups import join_rows
from keras_multigpu.engines.tensorflow.weights.reading import dtype_of, home_of, joined
from keras_multigpu.engines.tensorflow.weights.routes import Route
from keras_multigpu.engines.tensorflow.weights.rows import add_rows, merge_rows
from keras_multigpu.engines.values import Tensor

ONCE = "once"
"""The rule for a gradient in which each row occurs once, however often the batch uses it."""
LIKE = "like"
"""The rule for replicas of the same batch: equal rows are added place by place."""


class Sums:
    """Sums the gradients of the variables that an `Exchange` sends; it explains the arguments.

    Args:
        routes: the way of each variable, or of each of its parts, by the variable's `id`.
        wire: the type in which a variable's gradient crosses.
    """

    def __init__(
        self,
        devices: Sequence[str],
        routes: Mapping[int, Sequence[Sequence[Route]]],
        wire: Callable[[keras.Variable], str],
        wire_dtype: str | None,
        rules: Mapping[int, str],
        default: str | None,
        peers: Peers | None,
        by_rows: Collection[int],
    ):
        self._devices, self._routes = devices, routes
        self._wire, self._wire_dtype = wire, wire_dtype
        self._rules, self._default = rules, default
        self._peers, self._by_rows = peers, by_rows

    def of(
        self,
        variables: Sequence[keras.Variable],
        gradients: Sequence[dict[int, Tensor | None]],
        by_tables: Mapping[int, Sequence[Sequence[Tensor]]],
    ) -> list[Tensor | None]:
        """The sums for variables, each on its device; the other arguments are `Exchange.sum`'s."""
        with tf.name_scope("gradients"):  # reports recognize gradients by this name
            sums = [
                self._of_table(by_tables.get(id(variable), ()), variable)
                if id(variable) in self._by_rows
                else self._sum(gradients, variable)
                for variable in variables
            ]
            if self._peers is not None:
                sums = self._sum_over_processes(sums, variables, self._peers)
            return [self._finish(total, variable) for total, variable in zip(sums, variables)]

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
                total = add(list(found))  # of lookups, not of replicas: no rule is for them
                is_repeated = len(found) > 1 and isinstance(total, tf.IndexedSlices)
                parts.append(merge_rows(total) if is_repeated else total)
        with tf.device(home_of(variable)):
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
        with tf.device(home_of(variable)):
            return joined(parts, variable)

    def _sum_over_hosts(
        self, sent: Sequence[dict[str, Tensor]], routes: Sequence[Route], variable: keras.Variable
    ) -> Tensor | None:
        """Sums at home what the devices of each host have `sent`."""
        dtype = dtype_of(variable)
        sums = [self._sum_on_host(own, route, variable) for own, route in zip(sent, routes) if own]
        with tf.device(routes[0].home):
            return self._add([cast(part, dtype) for part in sums], variable)

    def _sum_over_processes(
        self, sums: Sequence[Tensor | None], variables: Sequence[keras.Variable], peers: Peers
    ) -> list[Tensor | None]:
        """Sums what each process has summed; merges what is not a plain sum by its rule."""
        are_plain = [
            not isinstance(one, tf.IndexedSlices) and id(variable) not in self._rules
            for one, variable in zip(sums, variables)
        ]
        plain = peers.sum(
            [one if is_plain else None for one, is_plain in zip(sums, are_plain)], self._wire_dtype
        )
        found = []
        for one, total, is_plain, variable in zip(sums, plain, are_plain, variables):
            if is_plain or one is None:
                found.append(total)
                continue
            with tf.device(home_of(variable)):
                sent = cast(one, self._wire(variable))
            every = peers.of_processes(tf.nest.flatten(sent, expand_composites=True))
            with tf.device(home_of(variable)):
                parts = [cast(_like(sent, part), dtype_of(variable)) for part in every]
                found.append(self._add(parts, variable))
        return found

    def _finish(self, total: Tensor | None, variable: keras.Variable) -> Tensor | None:
        # Replicas may send only the touched rows although the optimizer wants a dense gradient.
        is_table = isinstance(total, tf.IndexedSlices) and id(variable) not in self._by_rows
        if not is_table or getattr(variable, "names_rows_once", None) is not False:
            return total
        division = division_of(variable)
        with tf.device(home_of(variable)):
            pieces = [total] if division is None else division.split(total)
        parts = []
        for piece, part in zip(pieces, parts_of(variable)):
            with tf.device(part.device):
                parts.append(to_dense(piece, part.shape[0]))
        with tf.device(home_of(variable)):
            return joined(parts, variable)

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
                found.setdefault(self._devices[replica], []).append(gradient)
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


def _like(gradient: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Another process's gradient, from its tensors."""
    if not isinstance(gradient, tf.IndexedSlices):
        return parts[0]
    return tf.IndexedSlices(parts[0], parts[1], gradient.dense_shape)


def _names_rows_once(variable: keras.Variable) -> bool:
    return getattr(variable, "names_rows_once", False)
