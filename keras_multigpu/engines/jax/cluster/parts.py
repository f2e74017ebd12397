"""Batches of which each process gives its part: the rows of all, in the order of the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.cluster.joint import NO_WHOLE_NUMBER, check_has_rows
from keras_multigpu.engines.jax.cluster import joint
from keras_multigpu.engines.jax.cluster.processes import Group


def check(batch: Any) -> None:
    """Refuses a part of a batch that can't be joined with those of other processes.

    Raises:
        ValueError: if it has sparse tensors, or arrays of different numbers of rows.
    """
    leaves = jax.tree.leaves(batch, is_leaf=lambda one: isinstance(one, JAXSparse))
    for leaf in leaves:
        if isinstance(leaf, JAXSparse):
            raise ValueError(
                "Where each process gives its part of a batch, the batch has dense arrays only, on "
                f"JAX. Received: a {type(leaf).__name__} of shape {tuple(leaf.shape)}. Give dense "
                "rows, or join with `data='same'`."
            )
    counts = sorted({len(leaf) for leaf in leaves if np.ndim(leaf)})
    if len(counts) > 1:
        raise ValueError(
            "All arrays of a process's part of a batch must have the same number of rows. "
            f"Received: arrays of {', '.join(map(str, counts))} rows."
        )


def put(
    batch: Any,
    counts: Sequence[int],
    shared: NamedSharding,
    spread: NamedSharding,
    group: Group,
    *,
    is_spread: bool,
) -> Any:
    """The whole batch on the devices of all processes, from this process's part.

    Rows go straight to their devices if each device gets rows of its own process only; otherwise
    the parts are gathered first.

    Args:
        batch: the part.
        counts: the rows of each process's part.
        shared: copies to every device.
        spread: gives each device, or each group of devices, a part of the first axis.
        group: the processes.
        is_spread: whether the devices get parts of the rows.
    """
    devices, total = list(spread.mesh.devices.flat), sum(counts)
    width = spread.shard_shape((len(devices),))[0]  # of a group, whose devices have the same rows
    owners = [device.process_index for device in devices[::width]]
    leaves, given = jax.tree.flatten(batch)
    leaves = [np.asarray(leaf) for leaf in leaves]
    first = sum(counts[: group.number])
    if not (is_spread and _are_at_home(counts, owners)):
        with_rows = [leaf for leaf in leaves if leaf.ndim]
        whole, first = iter(_gather(with_rows, counts, spread, owners, group)), 0
        leaves = [next(whole) if leaf.ndim else leaf for leaf in leaves]
    sharding = spread if is_spread else shared
    return given.unflatten(
        joint.put(leaf, sharding, total, first) if leaf.ndim else joint.put(leaf, shared)
        for leaf in leaves
    )


def _are_at_home(counts: Sequence[int], owners: Sequence[int]) -> bool:
    """Whether devices, with equal numbers of rows, have rows of their own process only."""
    each = sum(counts) // len(owners)
    if not each or any(count % each for count in counts):
        return False
    return list(owners) == [k for k, count in enumerate(counts) for _ in range(count // each)]


def _gather(
    leaves: Sequence[Any],
    counts: Sequence[int],
    spread: NamedSharding,
    owners: Sequence[int],
    group: Group,
) -> list[Any]:
    """The rows of all processes, in the memory of this process.

    Each device takes a piece of its process's rows, and all pieces are copied to all devices. The
    `owners` are the processes that have the devices, or groups of these.
    """
    places = Counter(owners)
    size = max(1, *(-(-count // places[k]) for k, count in enumerate(counts)))
    ranks = [owners[:place].count(owner) for place, owner in enumerate(owners)]

    def pieces(leaf: Any) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> Any:
            rank = ranks[(index[0].start or 0) // size]
            rows = leaf[rank * size : (rank + 1) * size]
            filling = np.zeros((size - len(rows), *leaf.shape[1:]), leaf.dtype)
            return np.concatenate([rows, filling])

        shape = (len(owners) * size, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, spread, piece)

    known = joint.replicate(spread.mesh)([pieces(leaf) for leaf in leaves])
    group.wait(known)
    found = []
    for leaf in known:
        cut = np.asarray(leaf).reshape(len(owners), size, *leaf.shape[1:])
        parts = [
            np.concatenate([cut[d] for d, owner in enumerate(owners) if owner == k])[:count]
            for k, count in enumerate(counts)
        ]
        found.append(np.concatenate(parts))
    return found


def own_rows(outputs: Any, batches: Sequence[Sequence[int]], number: int) -> Any:
    """A process's rows of the outputs for whole batches, one after the other.

    `batches` has the rows of each process, for each batch. A row may have several of an output.
    """
    total = sum(map(sum, batches))

    def take(output: Any) -> Any:
        check_has_rows(output)
        rows = np.asarray(output)
        several, rest = divmod(len(rows), max(total, 1))
        if rest:
            raise ValueError(
                f"{NO_WHOLE_NUMBER} Received: {number_of(len(rows), 'row')} of an output, for "
                f"{total}."
            )
        first, parts = 0, []
        for counts in batches:
            start = first + sum(counts[:number])
            parts.append(rows[start * several : (start + counts[number]) * several])
            first += sum(counts)
        return np.concatenate(parts)

    return jax.tree.map(take, outputs)
