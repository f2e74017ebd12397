"""Writes a program into a graph: each region once, as a function that every device calls."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.at_home import blocks, write_compiled
from keras_multigpu.engines.tensorflow.partition.local import Devices, Local
from keras_multigpu.engines.tensorflow.partition.program import ALL, EACH, Item, Node, Program
from keras_multigpu.engines.tensorflow.partition.sending import hubs_of, wire_of

_FEW = 3  # nodes that are not worth a function


def write_local(program: Program, local: Local, given: Sequence[Any]) -> list[Any]:
    """Writes a program of which everything is on one device; returns its outputs' tensors."""
    known = dict(zip(map(id, program.inputs), given))
    are_apart = local.is_compiled and local.home is not None
    for is_plain, block in blocks(program.nodes) if are_apart else [(False, program.nodes)]:
        if is_plain:
            write_compiled(block, local, known, program)
        else:
            _write_nodes(block, local, known)
    return [known[id(item)] for item in program.outputs]


def _write_nodes(nodes: Sequence[Node], local: Local, known: dict[int, Any]) -> None:
    for node in nodes:
        for name, (item, axis) in node.sizes.items():
            if name not in local.sizes:
                local.sizes[name] = tf.shape(known[id(item)])[axis]
        outputs = node.emit(local, *[known[id(item)] for item in node.inputs])
        known.update((id(item), tensor) for item, tensor in zip(node.outputs, outputs))


def write(program: Program, devices: Devices, given: Sequence[Any]) -> list[Any]:
    """Writes a program for all devices; `given` and the result as for `Writer`."""
    return Writer(program, devices, given).write(program.outputs)


class Writer:
    """Writes a program for all devices, in one part or several.

    Args:
        program: the program.
        devices: the devices; says whether XLA compiles the regions.
        given: the inputs' tensors, or lists of one for each device. So are the results.
    """

    def __init__(self, program: Program, devices: Devices, given: Sequence[Any]):
        self._program, self._devices = program, devices
        self._known: dict[int, Any] = dict(zip(map(id, program.inputs), given))
        self._written: set[int] = set()
        self._takers: dict[int, list[Node]] = collections.defaultdict(list)  # of each item
        for node in program.nodes:
            for item in node.needs:
                self._takers[id(item)].append(node)
        self._hubs: dict[int, Any] = {}
        for number, column in enumerate(devices.columns):
            nodes = [node for node in program.nodes if node.column == number]
            self._hubs.update(hubs_of(nodes, column.names, column.home))

    def fork(self) -> Writer:
        """One that goes on from here, and leaves this one as it is."""
        other = copy.copy(self)
        vars(other).update(_known=dict(self._known), _written=set(self._written))
        return other

    def give(self, item: Item, tensor: Any) -> None:
        """Gives one more input."""
        self._known[id(item)] = tensor

    def write(self, outputs: Sequence[Item], until: int | None = None) -> list[Any]:
        """Writes what outputs need, and what has effects, of the nodes `until` a number."""
        devices, nodes = self._devices, _used(self._program.nodes[:until], outputs)
        nodes = [node for node in nodes if id(node) not in self._written]
        self._written.update(id(node) for node in nodes if not node.is_free)
        levels: dict[int, list[Node]] = collections.defaultdict(list)
        for node in nodes:
            levels[node.level].append(node)
        for _, now in sorted(levels.items()):
            alone = [node for node in now if node.place != EACH]
            if devices.is_joined:
                alone = self._reduce(alone)
            for is_plain, block in blocks(alone) if devices.is_compiled else [(False, alone)]:
                if is_plain:
                    local = devices.columns[block[0].column].whole
                    write_compiled(block, local, self._known, self._program)
                else:
                    for node in block:
                        self._write_alone([node])
            for number, column in enumerate(devices.columns):
                region = [node for node in now if node.place == EACH and node.column == number]
                if region:
                    made = _Region(region, self._takers, self._program.outputs)
                    made.write(column, self._known)
        return [self._known[id(item)] for item in outputs]

    def _reduce(self, nodes: Sequence[Node]) -> list[Node]:
        """Writes what all processes make of what is known, together; returns the other nodes."""
        now: dict[tuple[str, Any, int], list[Node]] = {}
        for node in nodes:
            if node.across and all(id(item) in self._known for item in node.needs):
                wire = wire_of(self._devices, node.outputs[0].dtype, node.crossing)
                now.setdefault((node.across.kind, wire, node.column), []).append(node)
        for together in now.values():
            self._write_alone(together)
        done = {id(node) for together in now.values() for node in together}
        return [node for node in nodes if id(node) not in done]

    def _write_alone(self, nodes: Sequence[Node]) -> None:
        """Writes a node that no region has, or several that the processes make likewise."""
        first = nodes[0]
        devices = self._devices.columns[first.column]
        made = [_emit(node, devices, self._known, self._hubs.get(id(node))) for node in nodes]
        across = [node.across for node in nodes if node.across is not None]
        if across:
            wire = wire_of(devices, first.outputs[0].dtype, first.crossing)
            with tf.device(devices.home):
                totals = devices.combine([one for (one,) in made], across, wire)
            made = [[one] for one in totals]
        for node, tensors in zip(nodes, made):
            self._known.update((id(item), tensor) for item, tensor in zip(node.outputs, tensors))


def _used(nodes: Sequence[Node], outputs: Sequence[Item]) -> list[Node]:
    """The nodes that outputs need, and those with effects."""
    wanted = set(map(id, outputs))
    used = []
    for node in reversed(nodes):
        is_kept = node.has_effect or node.place >= 0 or not node.outputs
        if is_kept or any(id(one) in wanted for one in node.outputs):
            used.append(node)
            wanted.update(id(item) for item in node.needs)
    return used[::-1]


def _emit(node: Node, devices: Devices, known: dict[int, Any], hubs: Any) -> Sequence[Any]:
    """The tensors of a crossing, or of what one device computes."""
    is_crossing = node.place == ALL
    with tf.device(None if is_crossing else devices.home):
        for name, (item, axis) in node.sizes.items():
            _set_size(devices, name, known[id(item)], axis)
        inputs = [known[id(item)] for item in node.inputs]
        more = {} if hubs is None else {"parts_of": hubs}
        return node.emit(devices if is_crossing else devices.whole, *inputs, **more)


def _set_size(devices: Devices, name: str, found: Any, axis: int) -> None:
    if name not in devices.whole.sizes:
        devices.set_size(name, tf.shape(found[0] if isinstance(found, list) else found)[axis])


class _Region:
    """What each device computes between two crossings.

    Args:
        nodes: its nodes.
        takers: the nodes that take an item, by its `id`.
        results: the items that the program's caller gets.
    """

    def __init__(
        self, nodes: Sequence[Node], takers: Mapping[int, list[Node]], results: Sequence[Item]
    ):
        self.nodes: list[Node] = []
        self.inputs: list[Item] = []
        self.sizes: dict[str, tuple[Item, int]] = {}
        self._inside = set(map(id, nodes))
        self._taken: set[int] = set()
        for node in nodes:
            self._take(node)
        wanted = set(map(id, results))

        def is_wanted(item: Item) -> bool:
            others = (one for one in takers.get(id(item), ()) if id(one) not in self._inside)
            # Other regions compute what is free again.
            return id(item) in wanted or any(
                one.place != EACH or not item.is_free for one in others
            )

        self.outputs = [one for node in nodes for one in node.outputs if is_wanted(one)]

    def _take(self, node: Node) -> None:
        """Adds a node, after the free nodes that it needs."""
        if id(node) in self._taken:
            return
        self._taken.add(id(node))
        for item in node.needs:
            if item.is_free:
                self._take(item.node)  # type: ignore[arg-type]
        for item in node.inputs:
            if self._is_outside(item) and id(item) not in self._taken:
                self._taken.add(id(item))
                self.inputs.append(item)
        found = {name: one for name, one in node.sizes.items() if self._is_outside(one[0])}
        self.sizes.update(found)
        self.nodes.append(node)

    def _is_outside(self, item: Item) -> bool:
        return id(item.node) not in self._inside and not item.is_free

    def write(self, devices: Devices, known: dict[int, Any]) -> None:
        """Writes it for all devices: as calls of one function, if it is more than a few nodes."""
        for name, (item, axis) in self.sizes.items():
            _set_size(devices, name, known[id(item)], axis)
        given = [known[id(item)] for item in self.inputs]
        is_function = devices.is_compiled or (devices.has_functions and len(self.nodes) > _FEW)
        call = self._function(devices, given) if is_function else self._write_one
        results = devices.each(lambda local, *own: call(local, own), devices.locals, *given)
        for item, parts in zip(self.outputs, zip(*results)):
            known[id(item)] = list(parts)

    def _write_one(self, local: Local, given: Sequence[Any]) -> list[Any]:
        known = dict(zip(map(id, self.inputs), given))
        _write_nodes(self.nodes, local, known)
        return [known[id(item)] for item in self.outputs]

    def _function(self, devices: Devices, given: Sequence[list[Any]]) -> Callable[..., Any]:
        """The region as a function of a device's `Local` and its inputs."""
        # XLA gives and takes no tensor lists; loops keep theirs for the gradient.
        is_compiled = devices.is_compiled and not any(
            one.dtype == tf.variant for one in (*self.inputs, *self.outputs)
        )
        each = [one.settings for one in devices.locals]
        fixed = {name: one for name, one in each[0].items() if _is_same([e[name] for e in each])}
        names = [name for name in each[0] if name not in fixed]
        sizes = list(devices.whole.sizes)

        def region(scalars: list[Any], values: list[Any], tensors: list[Any]) -> list[Any]:
            local = Local(
                **fixed,
                **dict(zip(names, scalars)),
                sizes=dict(zip(sizes, values)),
                is_compiled=devices.is_compiled,
                chosen=devices.chosen,
            )
            with tf.device(None):
                return self._write_one(local, tensors)

        scalar = tf.TensorSpec([], tf.int32)
        function = tf.function(region, autograph=False, jit_compile=is_compiled or None)
        traced = function.get_concrete_function(
            [scalar] * len(names), [scalar] * len(sizes), list(map(_spec, given))
        )

        def call(local: Local, own: Sequence[Any]) -> list[Any]:
            settings = local.settings
            scalars = [tf.convert_to_tensor(settings[name], tf.int32) for name in names]
            made = traced(scalars, [local.sizes[name] for name in sizes], list(own))
            # Branches and loops take what has a device of its own from there, and from their own
            # device what a function gives.
            return list(map(tf.identity, made))

        return call


def _is_same(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and value == values[0] for value in values)


def _spec(parts: Sequence[Any]) -> tf.TensorSpec:
    """The type and shape that all parts have."""
    merge = tf.TensorShape.most_specific_compatible_shape
    return tf.TensorSpec(functools.reduce(merge, [one.shape for one in parts]), parts[0].dtype)
