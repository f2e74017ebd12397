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
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def copy_to_all(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to every device; all processes call it together."""
    parted = [leaf for leaf in jax.tree.leaves(tree) if not _is_whole(leaf)]
    whole = iter(_replicate(mesh)(parted)) if parted else iter(())
    return jax.tree.map(lambda leaf: leaf if _is_whole(leaf) else next(whole), tree)


def compare(values: Any, what: str, mesh: Mesh, group: Group) -> None:
    """Raises a `ClusterError` if another process has other values of `what`: rows or weights."""
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    count = COMPARED if what == "rows" else sys.maxsize
    mine = np.full(1, digest_of(jax.tree.leaves(values), count), "int32")
    known = _replicate(mesh)(
        jax.make_array_from_callback((mesh.devices.size,), each, lambda index: mine)
    )
    group.wait(known)
    owners = [device.process_index for device in mesh.devices.flat]
    digests = dict(zip(owners, np.asarray(known).tolist()))
    for number in sorted(digests):
        if digests[number] != digests[0]:
            raise group.differs(number, what)


def _is_whole(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
