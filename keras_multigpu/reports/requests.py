"""What `advise` is asked: refused here, where it makes no sense, before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.reports.checks import check_count, check_quantity
from keras_multigpu.reports.links import Link, find_link
from keras_multigpu.reports.loads import check_mode
from keras_multigpu.reports.transfers_report import TransfersReport
from keras_multigpu.reports.workload import StepTime


def check_request(
    counts: Sequence[int],
    modes: Sequence[str],
    batch_size: Any,
    counted: Any,
    **numbers: Any,
) -> None:
    """Refuses what makes no sense, whatever the model.

    Args:
        counts: the numbers of devices.
        modes: the modes' names.
        batch_size: rows of a batch.
        counted: what `transfers` has counted.
        **numbers: other arguments of `advise`: `speed`, `processors`, `overlap`, `steps`.

    Raises:
        ValueError: if one is out of range.
    """
    for mode in modes:
        check_mode(mode)
    check_count("batch_size", batch_size)
    _check_numbers(**numbers)
    if "data" in modes:
        _check_slices(counts, batch_size)
    _check_counted(counted, batch_size)


def check_hosts(per_host: Any, host_link: Any, counts: Sequence[int]) -> Link | None:
    """The link between hosts, `None` if there is one host."""
    if per_host is not None:
        check_count("devices_per_host", per_host)
    several = per_host is not None and max(counts) > per_host
    if several != (host_link is not None):
        raise ValueError(
            "`devices_per_host` and `host_link` belong together, where there are more devices than "
            f"a host has. Received: devices_per_host={per_host!r}, host_link={host_link!r} and "
            f"n_gpus={tuple(counts)!r}. Give devices_per_host=8, host_link='ethernet25', say."
        )
    return find_link(host_link)


def _check_counted(counted: Any, batch_size: int) -> None:
    """Refuses what is no list of transfers counted for batches of this size."""
    reports = counted if isinstance(counted, Sequence) else (counted,)
    fits = [isinstance(one, TransfersReport) and one.batch_size == batch_size for one in reports]
    if not isinstance(counted, Sequence) or not all(fits):
        given = [getattr(one, "batch_size", type(one).__name__) for one in reports]
        raise ValueError(
            "`counted` must be a sequence of what `transfers` returns, for batches of "
            f"batch_size={batch_size} rows. Received: {given}. Give "
            "`[transfers(parallel, batch), ...]` with batches of that size."
        )


def _check_numbers(speed: Any, processors: Any, overlap: Any, steps: Any) -> None:
    check_count("steps", steps)
    check_quantity("speed", speed)
    if processors is not None:
        check_quantity("processors", processors)
    if check_quantity("overlap", overlap, zero=True) > 1:
        raise ValueError(
            "`overlap` must be a part, from 0 to 1. Received: "
            f"overlap={overlap!r}. Give 0 where copies and computations take turns."
        )


def _check_slices(counts: Sequence[int], batch_size: int) -> None:
    """Refuses more devices than there are rows to slice."""
    if max(counts) > batch_size:
        raise ValueError(
            f"In mode 'data' `n_gpus` must not exceed the batch_size={batch_size} rows of a batch: "
            f"further devices would have none. Received: n_gpus={tuple(counts)!r}. Give fewer "
            "devices, or a larger batch."
        )


def known_step(given: Any, batch_size: int) -> StepTime | None:
    """The step time that the user gives, in either form."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return StepTime(0.0, check_quantity("step_seconds", given) / batch_size)
    others = [rows for rows in given if rows != batch_size]
    if batch_size not in given or len(others) != 1 or not 0 < others[0] < batch_size:
        raise ValueError(
            f"`step_seconds` must have the time of a step on batch_size={batch_size} rows, and "
            f"that on a smaller batch. Received: step_seconds={given!r}. Give "
            f"{{{batch_size}: ..., {max(batch_size // 2, 1)}: ...}}, or one time."
        )
    times = {rows: check_quantity("step_seconds", one) for rows, one in given.items()}
    return StepTime.through(batch_size, times[batch_size], others[0], times[others[0]])
