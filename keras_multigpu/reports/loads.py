"""What each mode makes of a workload: who computes which rows, what crosses, what is kept where."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu.reports.interconnect import Link
from keras_multigpu.reports.prediction import Load, Prediction, Traffic, predict
from keras_multigpu.reports.traffic import (
    driver_between,
    outputs_traffic,
    ring_between,
    shard_traffic,
    weights_traffic,
)
from keras_multigpu.reports.workload import Workload

ENOUGH = 1.1  # a design whose step takes this many times the other's is the wrong one
_NONE = Traffic()


def check_mode(mode: str) -> None:
    """Raises a `ValueError` for an unknown mode."""
    if mode not in LOADS:
        raise ValueError(
            f"`modes` must be of {', '.join(map(repr, LOADS))}. Received: mode={mode!r}. A "
            "'committee' is mode 'tower' with `replicas='independent'`."
        )


def find_load(mode: str, work: Workload, devices: int) -> Load:
    """What a mode makes of a workload on a number of devices."""
    check_mode(mode)
    if mode != "data" and work.hosts(devices) > 1:
        raise ValueError(
            f"Only mode 'data' is predicted for several hosts. Received: mode={mode!r} on "
            f"{devices} devices, {work.per_host} in each host. Ask for {work.per_host} devices "
            "at most, or leave `devices_per_host` out."
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
    step, memory = work.step, work.sizes.memory(work.batch_size)
    load = Load(
        rows * step.row_s, total * step.row_s, step.seconds(work.batch_size), _NONE, memory,
        fixed_s=step.fixed_s,
    )  # fmt: skip
    return dataclasses.replace(load, **others)


def _load_data(work: Workload, devices: int) -> Load:
    """A slice of the batch for each device."""
    sizes, shard, hosts = work.sizes, work.shard, work.hosts(devices)
    rows, total = math.ceil(work.batch_size / devices), work.batch_size
    if work.by_compiler and work.batch_size % devices:  # each device computes the whole batch
        rows, total = work.batch_size, devices * work.batch_size
        if shard is None:
            return _load(work, rows, total)  # and needs nothing else
    if shard is None:
        traffic = weights_traffic(work, devices)
    else:
        traffic = shard_traffic(work, shard, devices)
    if not work.by_compiler and not (work.by_driver and hosts > 1):
        traffic += outputs_traffic(work, math.ceil(work.batch_size / hosts) - rows)
    memory = sizes.memory(rows) if shard is None else shard.memory(sizes, rows)
    has_home = shard is None and not work.by_compiler
    if has_home and memory is not None and sizes.working is not None:
        memory += sizes.gradients  # the parts that the weights' home sends, and the sums
    between = (driver_between if work.by_driver else ring_between)(work, devices)
    return _load(work, rows, total, traffic=traffic, memory=memory, between=between)


def _load_towers(work: Workload, devices: int, traffic: Traffic) -> Load:
    """The whole batch on each device, compared with as many batches on one device."""
    rows = work.batch_size
    traffic += outputs_traffic(work, rows * (devices - 1))
    alone_s = devices * work.step.seconds(rows)
    return _load(work, rows, devices * rows, traffic=traffic, alone_s=alone_s)


def _load_model(work: Workload, devices: int) -> Load:
    """The whole batch, with some of the layers on each device.

    Branches divide the work on the rows, but not the part that doesn't depend on the rows.
    """
    cut, rows = work.cuts[devices], work.batch_size
    traffic = Traffic(cut.size, cut.size, 2 * cut.copies)
    return _load(work, cut.share * rows, rows, traffic=traffic, memory=cut.memory)


LOADS: dict[str, Callable[[Workload, int], Load]] = {
    "data": _load_data,
    "tower": lambda work, n: _load_towers(work, n, weights_traffic(work, n)),
    "committee": lambda work, n: _load_towers(work, n, _NONE),  # with independent replicas
    "model": _load_model,
}


def predict_designs(
    work: Workload, devices: int, link: Link, host_link: Link | None
) -> tuple[Prediction, Prediction]:
    """A step of mode `"data"` with one driver of all hosts, and with a ring of hosts."""

    def predict_one(**design: Any) -> Prediction:
        load = find_load("data", dataclasses.replace(work, **design), devices)
        return predict("data", devices, load, link, work.processors, host_link=host_link)

    return predict_one(by_driver=True, by_compiler=False), predict_one(by_driver=False)


def compare_designs(
    work: Workload, counts: Sequence[int], link: Link, host_link: Link
) -> list[str]:
    """A note on the smallest number of devices for which one driver is the wrong design."""
    for count in sorted(count for count in counts if work.hosts(count) > 1):
        driver, ring = predict_designs(work, count, link, host_link)
        if driver.step_s > ENOUGH * ring.step_s:
            return [
                f"On {count} devices in {work.hosts(count)} hosts, a process per host "
                "(`cluster.join`) is assumed. One driver of all (`cluster.connect`, on TensorFlow) "
                f"takes {driver.step_s / ring.step_s:.1f} times as long: its link carries the "
                "weights, gradients and inputs of all hosts."
            ]
    return []
