"""What JAX's processes share: arrays over all devices, and checks that they are equal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.jax import devices
from keras_multigpu.engines.jax.cluster import processes
from keras_multigpu.engines.jax.cluster.group import Group
from keras_multigpu.engines.joint import COMPARED, check_owners, digest_of


def check_devices(names: Sequence[str], mode: str) -> None:
    """Raises a `ValueError` for devices of other processes that a model can't use."""
    group = processes.current()
    if group is None:
        processes.check_not_joined_elsewhere()
        return
    owners = {devices.find(name).process_index for name in names}
    check_owners(group, names, owners, mode)


def group_of(mesh: Mesh) -> Group | None:
    """The processes that share a mesh's devices; `None` if this process has them all."""
    group = processes.current()
    others = {device.process_index for device in mesh.devices.flat} - {jax.process_index()}
    return group if others else None


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array over devices of all processes, from the same value in each process."""
    host = np.asarray(value)

    def part(index: Any) -> np.ndarray:
        # On processors JAX may use this memory itself: of a view, that of the whole value.
        given = host[index]
        return given if given.size == host.size else given.copy()

    return jax.make_array_from_callback(host.shape, sharding, part)


def copy_to_all(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to every device; all processes call it together."""
    parted = [leaf for leaf in jax.tree.leaves(tree) if not _is_whole(leaf)]
    whole = iter(_replicate(mesh)(parted)) if parted else iter(())
    return jax.tree.map(lambda leaf: leaf if _is_whole(leaf) else next(whole), tree)


def compare(values: Any, what: str, mesh: Mesh, group: Group) -> None:
    """Raises a `ClusterError` if another process has other values of `what`: rows or weights."""
    mine = digest_of(jax.tree.leaves(values), COMPARED if what == "rows" else sys.maxsize)
    while min(digests := exchange(mine, mesh, group)) < 0:
        group.attend(digests)  # another process reads spread weights
    for number, digest in enumerate(digests):
        if digest != digests[0]:
            raise group.differs(number, what)


def exchange(mine: int, mesh: Mesh, group: Group) -> list[int]:
    """The numbers of all processes, in their order; all call it together."""
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.full(1, mine, "int32")
    known = _replicate(mesh)(
        jax.make_array_from_callback((mesh.devices.size,), each, lambda index: own)
    )
    group.wait(known)
    owners = [device.process_index for device in mesh.devices.flat]
    numbers = dict(zip(owners, np.asarray(known).tolist()))
    return [numbers[owner] for owner in sorted(numbers)]


def _is_whole(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
