"""What each mode makes of a workload: who computes what, what crosses, what is kept where."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from keras_multigpu.reports.hosts import (
    driver_between,
    hubs_inside,
    ring_between,
    ring_inside,
)
from keras_multigpu.reports.workload import Load, Traffic, Workload


def find_load(mode: str, work: Workload, devices: int) -> Load:
    """What a mode makes of a workload on a number of devices.

    Raises:
        ValueError: if the mode is not in `LOADS`, or is `"model"` and it is not known how the model
            is spread.
    """
    check_mode(mode)
    if mode != "data" and work.hosts(devices) > 1:
        raise ValueError(
            "Only mode 'data' goes over several hosts here. Received: mode="
            f"{mode!r} on {devices} devices, {work.per_host} in each host. Ask for {work.per_host} "
            "devices at most, or leave `devices_per_host` out."
        )
    if mode == "model" and devices > 1 and devices not in work.cuts:
        raise ValueError(
            "For mode 'model' it must be known how the model is spread. Received: "
            f"cuts={dict(work.cuts)!r}, without {devices} devices. Give "
            f"`cuts={{{devices}: Cut(size, copies, share)}}`."
        )
    return LOADS[mode](work, devices)


def check_mode(mode: str) -> None:
    """Refuses a mode that is not known.

    Raises:
        ValueError: if it is not in `LOADS`.
    """
    if mode not in LOADS:
        raise ValueError(
            f"`modes` must be of {', '.join(map(repr, LOADS))}. Received: mode={mode!r}. A "
            "'committee' is mode 'tower' with `replicas='independent'`."
        )


def _load_data(work: Workload, devices: int) -> Load:
    """A slice of the batch for each device."""
    rows = _rows_of_busiest(work, devices)
    # Where each device computes the whole batch, none needs anything of the others.
    is_split = devices > 1 and not (work.partitions and work.batch_size % devices)
    traffic = _shared_weights(work, devices) if is_split else Traffic()
    between = _between_hosts(work, devices) if is_split else Traffic()
    if is_split and not work.partitions and work.hosts(devices) == 1:
        traffic = _add(traffic, _gathered(work, work.batch_size - rows))
    all_rows = work.batch_size if is_split else devices * rows
    return _load(work, rows, all_rows, traffic, rows, between)


def _load_tower(work: Workload, devices: int) -> Load:
    """The whole batch on each device, with one set of weights."""
    traffic = _shared_weights(work, devices) if devices > 1 else Traffic()
    return _towers(work, devices, traffic)


def _load_committee(work: Workload, devices: int) -> Load:
    """The whole batch on each device, whose weights are its own."""
    return _towers(work, devices, Traffic())


def _towers(work: Workload, devices: int, traffic: Traffic) -> Load:
    rows = work.batch_size
    traffic = _add(traffic, _gathered(work, rows * (devices - 1)))
    load = _load(work, rows, devices * rows, traffic, rows)
    return dataclasses.replace(load, alone_s=devices * load.alone_s)


def _load_model(work: Workload, devices: int) -> Load:
    """The whole batch, on devices that have some of the layers each.

    Branches share the work on the rows, and not what a step takes however few rows there are.
    """
    rows = work.batch_size
    if devices == 1:
        return _load(work, rows, rows, Traffic(), rows)
    cut = work.cuts[devices]
    traffic = Traffic(cut.size, cut.size, 2 * cut.copies)
    load = _load(work, cut.share * rows, rows, traffic, rows)
    return dataclasses.replace(load, memory=cut.memory)


def _load(
    work: Workload,
    busiest: float,
    total: float,
    traffic: Traffic,
    kept: int,
    between: Traffic | None = None,
) -> Load:
    """The load of devices on so many rows: the busiest one's, all devices', those kept by one."""
    step = work.step
    return Load(
        busiest * step.row_s,
        total * step.row_s,
        step.seconds(work.batch_size),
        traffic,
        _memory(work, kept),
        between or Traffic(),
        step.fixed_s,
    )


LOADS: dict[str, Callable[[Workload, int], Load]] = {
    "data": _load_data,
    "tower": _load_tower,
    "committee": _load_committee,
    "model": _load_model,
}
"""What each mode makes of a workload; `"committee"` is towers with weights of their own."""


def _shared_weights(work: Workload, devices: int) -> Traffic:
    """The weights' way to the devices of a host, and the gradients' way back."""
    return ring_inside(work, devices) if work.partitions else hubs_inside(work, devices)


def _between_hosts(work: Workload, devices: int) -> Traffic:
    return ring_between(work, devices) if work.partitions else driver_between(work, devices)


def _gathered(work: Workload, rows: int) -> Traffic:
    """The outputs of rows on other devices, which are merged on one, and their gradients."""
    size = rows * work.sizes.outputs
    return Traffic(size, size, 2 if rows else 0)


def _add(first: Traffic, second: Traffic) -> Traffic:
    return Traffic(
        first.sent + second.sent,
        first.received + second.received,
        first.copies + second.copies,
        first.duplex,
    )


def _memory(work: Workload, rows: int) -> int | None:
    """The bytes of a device that has all the weights, their gradients and slots, and some rows."""
    sizes = work.sizes
    if sizes.activations is None:
        return None
    return sizes.weights + sizes.gradients + sizes.slots + rows * sizes.activations


def _rows_of_busiest(work: Workload, devices: int) -> int:
    """The rows of the largest slice of a batch."""
    if work.partitions and work.batch_size % devices:
        return work.batch_size
    return math.ceil(work.batch_size / devices)
