"""What JAX's processes share: arrays over all devices, and checks that they are equal."""

from __future__ import annotations

import dataclasses
import functools
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.cluster.joint import check_owners
from keras_multigpu.engines.cluster.listing import COMPARED, Listing, describe, digest_of
from keras_multigpu.engines.cluster.places import STEP, odd_one
from keras_multigpu.engines.jax import devices
from keras_multigpu.engines.jax.cluster import processes
from keras_multigpu.engines.jax.cluster.processes import Group

# Always as many numbers: arrays of other sizes, in processes that compare different things, would
# make gloo abort them.
_EXCHANGED = 6

Facts = Mapping[str, tuple[int, str | Listing]]
"""What processes compare: numbers of 31 bits, and what to tell of them."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What a process tells of a step that it begins.

    Attributes:
        name: `"train_step"`, ...
        position: how many steps this pass over the data has had.
        sample: a checksum of weights.
        settings: JAX's.
    """

    name: str = ""
    position: int = 0
    sample: int = 0
    settings: str = ""


def check_devices(names: Sequence[str], mode: str) -> None:
    """Raises a `ValueError` for devices of other processes that a model can't use."""
    group = processes.current()
    if group is None:
        processes.check_not_joined_elsewhere()
        return
    owners = {devices.find(name).process_index for name in names}
    check_owners(group, names, owners, mode)


def group_of(names: Sequence[str]) -> Group | None:
    """The processes that share the named devices; `None` if this process has them all."""
    group = processes.current()
    others = {devices.find(name).process_index for name in names} - {jax.process_index()}
    return group if others else None


def put(value: Any, sharding: NamedSharding, total: int | None = None, first: int = 0) -> jax.Array:
    """An array over devices of all processes, from the same value in each process.

    Of `total` rows a process may have those of its devices only, from the row `first` on.
    """
    host = np.asarray(value)
    shape = host.shape if total is None else (total, *host.shape[1:])

    def part(index: Any) -> np.ndarray:
        if total is not None:
            start, end, _ = index[0].indices(total)
            index = slice(start - first, end - first)
        # On processors JAX may use this memory itself: of a view, that of the whole value.
        given = host[index]
        return given if given.size == host.size else given.copy()

    return jax.make_array_from_callback(shape, sharding, part)


def copy_to_all(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to every device; all processes call it together."""
    parted = [leaf for leaf in jax.tree.leaves(tree) if not is_whole(leaf)]
    whole = iter(replicate(mesh)(parted)) if parted else iter(())
    return jax.tree.map(lambda leaf: leaf if is_whole(leaf) else next(whole), tree)


def compare_weights(values: Listing, mesh: Mesh, group: Group, name: str = "step") -> None:
    """Raises a `ClusterError` if another process has other weights, or has no new ones.

    `name` is that of the step that follows.
    """
    when = "before which weights, metrics or slots were set, as at the beginning of an epoch"
    step = f"a {name} {when}"
    place = group.calls.here(f"new weights or metrics before step {group.call.begun + 1}")
    facts: Facts = {"steps": (_checksum(step), step), "weights": (values.checksum, values)}
    _compare(facts, 0, place, mesh, group, ahead=1)


def meet(step: str, mesh: Mesh, group: Group) -> None:
    """Waits for the other processes; raises a `ClusterError` if one makes another step."""
    place = group.calls.here(f"{step} after step {group.call.begun}")
    _compare({"steps": (_checksum(step), step)}, 0, place, mesh, group)


def compare_steps(batch: Any, step: Step, mesh: Mesh, group: Group) -> list[int]:
    """Raises a `ClusterError` if another process makes another step, or has other data or weights.

    Returns:
        How many rows each process has.
    """
    leaves = jax.tree.leaves(batch)
    rows = next((len(leaf) for leaf in leaves if np.ndim(leaf)), 0)
    facts: dict[str, tuple[int, str | Listing]] = {"steps": (_checksum(step.name), step.name)}
    if group.data == "parts":
        facts["passes"] = step.position, f"step {step.position + 1} of a pass"
        facts["parts"] = _digest_of_part(batch), describe(batch)
    else:
        facts["rows"] = digest_of(leaves, COMPARED), ""
    facts["values"] = _checksum(step.settings), step.settings
    facts["weights"] = step.sample, ""
    place = group.calls.here(f"step {group.call.begun}")
    return _compare(facts, rows, place, mesh, group)


def _compare(
    facts: Facts, rows: int, place: str, mesh: Mesh, group: Group, ahead: int = 0
) -> list[int]:
    """Raises a `ClusterError` if a fact differs; returns the `rows` of each process.

    The step in question is `ahead` of the one that has begun.
    """
    numbers = [number for number, _ in facts.values()]
    numbers += [0] * (_EXCHANGED - 1 - len(numbers)) + [rows]
    with group.places.at(f"{STEP} on {mesh.device_ids.tolist()}", place):
        every = exchange(numbers, mesh, group)
        while min(every)[0] < 0:  # another process reads spread weights
            group.attend([one[0] for one in every])
            every = exchange(numbers, mesh, group)
    for column, (what, (_, told)) in enumerate(facts.items()):
        found = odd_one([one[column] for one in every])
        if found is not None:
            raise group.differs(*found, what, told, ahead)
    return [one[-1] for one in every]


def exchange(numbers: Sequence[int], mesh: Mesh, group: Group) -> list[list[int]]:
    """The numbers of all processes, none more than `_EXCHANGED`; all call it together."""
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    mine, shape = np.zeros((1, _EXCHANGED), "int32"), (mesh.devices.size, _EXCHANGED)
    mine[0, : len(numbers)] = numbers
    known = replicate(mesh)(jax.make_array_from_callback(shape, each, lambda index: mine))
    group.wait(known)
    owners = [device.process_index for device in mesh.devices.flat]
    found = dict(zip(owners, np.asarray(known).tolist()))
    return [found[number] for number in sorted(found)]


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode()) >> 1


def _digest_of_part(batch: Any) -> int:
    """A checksum of what the parts of a batch have in common, scalars with their values."""
    leaves, structure = jax.tree.flatten(batch)
    kinds = [(str(leaf.dtype), leaf.shape[1:]) for leaf in map(np.asarray, leaves)]
    scalars = [leaf for leaf in leaves if not np.ndim(leaf)]
    text = repr((str(structure), kinds, digest_of(scalars, sys.maxsize)))
    return _checksum(text)


def is_whole(leaf: Any) -> bool:
    """Whether this process has all of a value."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated


@functools.cache
def replicate(mesh: Mesh) -> Any:
    """A function that copies arrays to every device."""
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
