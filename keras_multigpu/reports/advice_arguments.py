"""Checks of what `advise` is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.arguments import positive_integer, quantity
from keras_multigpu.reports.interconnect import Link, find_link
from keras_multigpu.reports.loads import check_mode
from keras_multigpu.reports.prediction import StepTime
from keras_multigpu.reports.transfers_report import TransfersReport


def check_modes(modes: Sequence[str], counts: Sequence[int], batch_size: int) -> None:
    """Known modes; in mode `"data"` every device needs a row."""
    for mode in modes:
        check_mode(mode)
    if "data" in modes and max(counts) > batch_size:
        raise ValueError(
            f"In mode 'data' `n_gpus` must not exceed the batch_size={batch_size} rows of a batch: "
            f"further devices would get no rows. Received: n_gpus={tuple(counts)!r}. Give fewer "
            "devices, or a larger batch."
        )


def check_hosts(per_host: Any, host_link: Any, counts: Sequence[int]) -> Link | None:
    """The link between hosts, `None` if there is one host."""
    if per_host is not None:
        per_host = positive_integer("devices_per_host", per_host)
    several = per_host is not None and max(counts) > per_host
    if several != (host_link is not None):
        raise ValueError(
            "`devices_per_host` and `host_link` must be given together, and only if there are more "
            f"devices than a host has. Received: devices_per_host={per_host!r}, "
            f"host_link={host_link!r} and n_gpus={tuple(counts)!r}. Give devices_per_host=8, "
            "host_link='ethernet25', for example."
        )
    return find_link(host_link)


def check_counted(counted: Any, batch_size: int) -> None:
    """Only reports for batches of this size can be used."""
    reports = counted if isinstance(counted, Sequence) else (counted,)
    fits = [isinstance(one, TransfersReport) and one.batch_size == batch_size for one in reports]
    if not isinstance(counted, Sequence) or not all(fits):
        given = [getattr(one, "batch_size", type(one).__name__) for one in reports]
        raise ValueError(
            "`counted` must be a sequence of reports that `transfers` returned for batches of "
            f"batch_size={batch_size} rows. Received: {given}. Give "
            "`[transfers(parallel, batch), ...]` with batches of that size."
        )


def known_step(given: Any, batch_size: int) -> StepTime | None:
    """The step time that the user gave, if any."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return StepTime(0.0, quantity("step_seconds", given) / batch_size)
    others = [rows for rows in given if rows != batch_size]
    if batch_size not in given or len(others) != 1 or not 0 < others[0] < batch_size:
        raise ValueError(
            f"`step_seconds` must have the time of a step on batch_size={batch_size} rows and on "
            f"one smaller batch. Received: step_seconds={given!r}. Give "
            f"{{{batch_size}: ..., {max(batch_size // 2, 1)}: ...}}, or one time."
        )
    times = {rows: quantity("step_seconds", one) for rows, one in given.items()}
    return StepTime.through(batch_size, times[batch_size], others[0], times[others[0]])


def check_rows(name: str, arrays: Any, batch_size: int) -> None:
    """Raises a `ValueError` if an array has fewer rows than a batch."""
    shapes = [tuple(np.shape(part)) for part in keras.tree.flatten(arrays)]
    if not shapes or any(not shape or shape[0] < batch_size for shape in shapes):
        raise ValueError(
            f"`{name}` must have at least batch_size={batch_size} rows, to time a step on a whole "
            f"batch. Received: {name} of the shapes {shapes}. Give `x[:{batch_size}]`."
        )
