"""What each mode makes of a workload: who computes which rows, what crosses, what is kept where.

Several hosts have a process each (`cluster.join`), which sum the gradients in a ring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keras_multigpu.arguments import number_of
from keras_multigpu.reports.prediction import Load, Traffic
from keras_multigpu.reports.workload import Shard, Sizes, Workload


def find_load(mode: str, work: Workload, devices: int) -> Load:
    """What a mode (of `LOADS`) makes of a workload on a number of devices."""
    if mode != "data" and work.hosts(devices) > 1:
        raise ValueError(
            f"Only mode 'data' is predicted for several hosts. Received: mode={mode!r} on "
            f"{devices} devices, {work.per_host} in each host. Ask for "
            f"{number_of(work.per_host or 1, 'device')} at most, or leave `devices_per_host` out."
        )
    if devices == 1:
        return _load(work, work.batch_size, work.batch_size)
    if mode == "model" and devices not in work.cuts:
        raise ValueError(
            "Mode 'model' needs to know how the model is divided. Received: "
            f"cuts={dict(work.cuts)!r}, without {devices} devices. Give "
            f"`cuts={{{devices}: Cut(size, copies, share)}}`."
        )
    return LOADS[mode](work, devices)


def _load(work: Workload, rows: float, total: float, **others: Any) -> Load:
    """The load of the rows of the busiest device, and of all devices; they keep the whole batch."""
    step, memory = work.step, _memory(work, work.batch_size, 1)
    alone_s, fixed_s = step.seconds(work.batch_size), step.fixed_s
    load = Load(rows * step.row_s, total * step.row_s, alone_s, Traffic(), memory, fixed_s=fixed_s)
    return dataclasses.replace(load, **others)


def _load_data(work: Workload, devices: int) -> Load:
    """A slice of the batch for each device."""
    rows, total = math.ceil(work.batch_size / devices), work.batch_size
    if work.by_compiler and work.batch_size % devices:  # each device computes the whole batch
        rows, total = work.batch_size, devices * work.batch_size
        if work.shard is None:
            return _load(work, rows, total)  # and needs nothing else
    if work.shard is not None:
        traffic = _shards(work, work.shard, devices)
    elif work.by_compiler or work.hosts(devices) > 1:
        traffic = weights_inside(work, devices)
    else:
        traffic = _hubs_beside_tables(work, devices)
    between = ring_between(work, devices)
    memory = _memory(work, rows, devices)
    return _load(work, rows, total, traffic=traffic, memory=memory, between=between)


def _memory(work: Workload, rows: int, devices: int) -> int | None:
    """The bytes of the fullest device in mode `"data"`; `None` if nothing was counted."""
    sizes, shard = work.sizes, work.shard
    if sizes.working is None:
        return None
    kept, working = sizes.weights + sizes.slots, sizes.working
    updating = 0  # what an update needs beside these: a step needs as much at least
    besides = 0  # what is there all the time
    if devices > 1 and shard is not None:
        kept = round(shard.weights * sizes.weights + shard.slots * sizes.slots)
        # A step gathers the other weights, which go as gradients come.
        working = min(working, sizes.gradients)
        if sizes.looped and not work.by_compiler:
            # When a loop ends, all gradients of its weights are there: beside them are the gathered
            # weights, the parts that other devices send, and the update of a device's part.
            update = max(sizes.working - sizes.gradients, 0)
            working += round(2 * sizes.looped + shard.slots * update)
        gathered = sizes.weights - shard.tables - shard.table_gradients
        besides = round((1 - shard.weights) * gathered)
        # Beside weights that are whole a device's part of the gradients lies until the update.
        updating = round((1 + shard.slots) * sizes.gradients) if shard.weights == 1 else 0
    elif devices > 1 and work.by_compiler:
        # All gradients wait for their sums, so that none is updated in between.
        updating = 2 * sizes.gradients
    elif devices > 1:
        # The first device has the weights, so the parts that it sends and the sums; and the batch.
        besides = sizes.gradients + (devices - 1) * rows * sizes.inputs
    step = max(working + rows * sizes.activations, updating + rows * sizes.inputs)
    return kept + step + besides


def _load_towers(work: Workload, devices: int, traffic: Traffic) -> Load:
    """The whole batch on each device, compared with as many batches on one device.

    Outputs meet on one device, which mixes them, and their gradients go back.
    """
    rows = work.batch_size
    size = rows * (devices - 1) * work.sizes.outputs
    traffic += Traffic(size, size, 2)
    alone_s = devices * work.step.seconds(rows)
    return _load(work, rows, devices * rows, traffic=traffic, alone_s=alone_s)


def _load_model(work: Workload, devices: int) -> Load:
    """Some of the layers on each device; branches divide only the work on the rows."""
    cut, rows = work.cuts[devices], work.batch_size
    traffic = Traffic(cut.size, cut.size, 2 * cut.copies)
    return _load(work, cut.share * rows, rows, traffic=traffic, memory=cut.memory)


LOADS: dict[str, Callable[[Workload, int], Load]] = {
    "data": _load_data,
    "tower": lambda work, n: _load_towers(work, n, weights_inside(work, n)),
    "committee": lambda work, n: _load_towers(work, n, Traffic()),  # with independent replicas
    "model": _load_model,
}


def check_rows(devices: int, batch_size: int) -> None:
    """A row for every device in mode `"data"`."""
    if devices > batch_size:
        raise ValueError(
            "In mode 'data' `n_gpus` must not exceed the "
            f"batch_size={number_of(batch_size, 'row')} of a batch: further devices would get no "
            f"rows. Received: {devices} devices. Give fewer devices, or a larger batch."
        )


def check_modes(modes: Sequence[str], placement: Any = None) -> None:
    """One known mode or more; how `"model"` divides."""
    if isinstance(modes, str) or not modes:
        raise ValueError(
            f"`modes` must be a sequence of one mode or more. Received: modes={modes!r}. Give "
            f"`modes=({modes or 'data'!r},)`."
        )
    for mode in modes:
        if mode not in LOADS:
            raise ValueError(
                f"`modes` must be of {', '.join(map(repr, LOADS))}. Received: mode={mode!r}. A "
                "'committee' is mode 'tower' with `replicas='independent'`."
            )
    if placement is not None and not isinstance(placement, Mapping):
        raise ValueError(
            "`placement` must be a dict from names of layers to device numbers, or None. Received: "
            f"placement={placement!r}. For other divisions count with `reports.transfers`, and "
            "give `cuts`."
        )
    if placement and "model" not in modes:
        raise ValueError(
            f"`placement` is for mode 'model'. Received: placement={placement!r} and "
            f"modes={tuple(modes)!r}. Add 'model' to `modes`, or leave `placement` out."
        )


def _shards(work: Workload, shard: Shard, devices: int) -> Traffic:
    """Gradients of P bytes are summed where their parts are, and weights are gathered.

    A device sends P (n - 1) / n bytes each time. For the tables in P it rather sends the inputs of
    its rows, and sums of the other devices' rows and their gradients.
    """
    looked_up = work.sizes.inputs + 2 * shard.sums if shard.sums else 0
    total = 2 * (work.sizes.gradients - shard.tables) + work.batch_size * looked_up
    size = (devices - 1) / devices * total
    copies = 2 * (devices - 1 if work.by_compiler else work.sizes.tensors)
    return Traffic(size, size, copies, duplex=work.by_compiler)


def weights_inside(work: Workload, devices: int) -> Traffic:
    """A device's traffic of weights and gradients within a host: in a ring, or through hubs."""
    count = work.in_host(devices)
    return _sums(work, count) if work.by_compiler else _hubs(work.sizes, count)


def ring_between(work: Workload, devices: int) -> Traffic:
    """A host's traffic in a ring of hosts, which sums the gradients."""
    hosts = work.hosts(devices)
    return _sums(work, hosts) if work.by_compiler else _ring(work.sizes.gradients, hosts)


def _sums(work: Workload, count: int) -> Traffic:
    """A ring; of large tables' gradients only the rows that the others have looked up cross."""
    rows = work.batch_size * work.sizes.looked_up * (count - 1) / count
    sums = _ring(work.sizes.gradients - work.sizes.tables, count)
    return sums + Traffic(rows, rows, duplex=True)


def _ring(size: float, count: int) -> Traffic:
    """Sums of `size` bytes are scattered over a ring, and gathered again.

    2 P (n - 1) / n bytes each way in 2 (n - 1) rounds, which is optimal (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    """
    sent = 2 * (count - 1) / count * size
    return Traffic(sent, sent, 2 * (count - 1), duplex=True)


def _hubs(sizes: Sizes, count: int) -> Traffic:
    """Weights go out through hubs, and gradients come back to them.

    The weights' device sends all of them once. It receives P (2n - 3) / (n - 1) bytes of gradients
    (`docs/decisions/2026-11-hubs.md`).
    """
    if count == 1:
        return Traffic()
    back = (2 * count - 3) / (count - 1)
    return Traffic(sizes.weights, back * sizes.gradients, (1 + back) * sizes.tensors)


def _hubs_beside_tables(work: Workload, devices: int) -> Traffic:
    """The traffic of the weights' device, on which large tables stay.

    It sends the other devices' rows of these, and gets the rows' gradients, and for most optimizers
    their squares.
    """
    sizes = work.sizes
    weights, gradients = sizes.weights - sizes.tables, sizes.gradients - sizes.tables
    others = dataclasses.replace(sizes, weights=weights, gradients=gradients)
    rows = work.batch_size * sizes.looked_up * (devices - 1) / devices
    return _hubs(others, devices) + Traffic(rows, 2 * rows)


def find_busiest(transfers: Iterable[Any], *, duplex: bool = False) -> Traffic:
    """The busiest device's traffic, from the `engines.Transfer`s that were counted."""
    found: dict[str, Traffic] = {}
    for one in transfers:
        size = one.bytes or 0
        for name, sent in ((one.source, size), (one.target, 0)):
            new = Traffic(sent, size - sent, one.copies)
            found[name] = found.get(name, Traffic(duplex=duplex)) + new
    sums = {(one.sent + one.received, name): one for name, one in found.items()}
    return sums[max(sums)] if sums else Traffic(duplex=duplex)
