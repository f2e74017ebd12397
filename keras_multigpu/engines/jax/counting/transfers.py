"""What crosses between devices, read from the compiled step.

XLA's collective operations are counted as ring algorithms (each device sends to the next one of its
group), than which no algorithm sends less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from keras_multigpu.engines.jax.devices import name_of
from keras_multigpu.engines.values import Transfer

HOST = "host"
GATHERED = "gathered_weights"
"""The scope of operations that make spread weights whole."""
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) "
    r"(?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ALONG = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}:]*)\}")
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = re.compile(r"\d+")
_Links: TypeAlias = list[tuple[int, ...]]

BACKWARD = "transpose("  # `jax.grad` transposes the operations of the derivative


def count_collectives(text: str, devices: Sequence[str]) -> list[Transfer]:
    """What a compiled program's collective operations move."""
    return [
        Transfer(devices[source], devices[target], kind, name, size, copies)
        for kind, name, size, copies, links in _collectives(text, len(devices))
        for source, target in links
        if source != target and size
    ]


def count_inputs(batch: Any) -> list[Transfer]:
    """What goes from the host to the devices, of a batch that is there."""
    return [
        Transfer(HOST, name_of(device), "inputs", f"batch {number}", bytes_on(device, [array]), 1)
        for number, array in enumerate(jax.tree.leaves(batch))
        for device in array.sharding.devices_indices_map(np.shape(array))
    ]


def _collectives(text: str, count: int) -> Iterator[tuple[str, str, int, int, _Links]]:
    """For each tensor that crosses: its kind, name, bytes that each device sends, copies, links."""
    trains = "transpose(jvp" in text
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        origin = origin_of(line)
        shapes = _SHAPE.findall(found["shapes"])
        name = found["name"]
        if "-start(" in found[0] and name != "all-reduce":
            shapes = shapes[len(shapes) // 2 :]  # the operands come first
        groups = _groups(line, count)
        share, copies = _ring(name, len(groups[0]))
        links = groups if name == "collective-permute" else _rings(groups)
        for dtype, axes in shapes:
            yield (
                _kind(name, origin, trains),
                f"{name} {dtype}[{axes}] of {origin}",
                round(_shape_bytes(dtype, axes) * share),
                copies,
                links,
            )


def origin_of(line: str) -> str:
    """The operation of the traced program that a line comes from; `""` for XLA's own copies."""
    described = _OP_NAME.search(line)
    return described[1] if described else ""


def _groups(line: str, count: int) -> _Links:
    """The numbers of the devices that send to each other; pairs, of a permutation.

    XLA writes them out, or as those of a grid along some axes; all devices, if it says nothing.
    """
    if found := _LISTED.search(line):
        return [tuple(map(int, one.split(","))) for one in re.findall(r"\{([\d,]+)", found[1])]
    grid: np.ndarray[Any, Any] = np.arange(count)
    if found := _IOTA.search(line):
        shape, sizes, order = (
            [int(n) for n in (one or "").split(",") if n] for one in found.groups()
        )
        grid = grid.reshape(sizes).transpose(order or None).reshape(shape)
    elif found := _ALONG.search(line):
        names = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        along = [list(names).index(one) for one in re.findall(r"'(\w+)'", found[2])]
        sizes = list(map(int, names.values()))
        grid = np.moveaxis(grid.reshape(sizes), along, list(range(-len(along), 0)))
        grid = grid.reshape(-1, math.prod(sizes[axis] for axis in along))
    return [tuple(map(int, group)) for group in grid.reshape(-1, grid.shape[-1])]


def _rings(groups: _Links) -> _Links:
    """From each device of a group to the next."""
    return [
        (one, group[(place + 1) % len(group)])
        for group in groups
        for place, one in enumerate(group)
    ]


def _kind(name: str, origin: str, trains: bool) -> str:
    """What a collective operation sends, by the name of the operation that it serves."""
    if BACKWARD in origin:
        return "gradients"
    is_update = trains and "jvp(" not in origin and "metrics" not in origin
    return (
        "weights" if GATHERED in origin or (name == "all-gather" and is_update) else "activations"
    )


def _ring(name: str, count: int) -> tuple[float, int]:
    """What each device sends, relative to the result's size, and in how many copies."""
    part = (count - 1) / count
    return {
        "all-reduce": (2 * part, 2 * (count - 1)),
        "all-gather": (part, count - 1),
        "reduce-scatter": (count - 1.0, count - 1),
        "all-to-all": (part, count - 1),
        "collective-permute": (1.0, 1),
    }[name]


def shape_bytes(shapes: str) -> int:
    """The bytes of the arrays of an operation's result, as a program's text describes them."""
    return sum(_shape_bytes(*one) for one in _SHAPE.findall(shapes))


def _shape_bytes(dtype: str, axes: str) -> int:
    bits = _BITS.search(dtype)  # `pred` is a byte
    size = int(bits[0]) if bits else 8
    return math.prod(map(int, filter(None, axes.split(",")))) * size // 8


def bytes_on(device: jax.Device, arrays: list[jax.Array]) -> int:
    """The bytes of arrays that are on a device."""
    return sum(
        math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
        for one in arrays
        if device in one.devices()
    )
