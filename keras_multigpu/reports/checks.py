"""The checks of what `advise` and `plan` are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import positive_integer, quantity
from keras_multigpu.reports.interconnect import Link, find_link
from keras_multigpu.reports.loads import LOADS
from keras_multigpu.reports.workload import Cut, StepTime

_NOISE = 1.1  # by as much may two measurements of one time differ


def check_modes(modes: Sequence[str], counts: Sequence[int], batch_size: int) -> None:
    """One known mode or more; in mode `"data"` every device needs a row."""
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
    odd = [count for count in counts if per_host and count > per_host and count % per_host]
    if odd:
        raise ValueError(
            "`n_gpus` above `devices_per_host` must be multiples of it: each host has as many. "
            f"Received: n_gpus={tuple(counts)!r} and devices_per_host={per_host}, which does not "
            f"divide {odd[0]}. Give n_gpus=(1, {2 * (per_host or 1)}), for example."
        )
    return find_link(host_link)


def check_cuts(cuts: Any) -> dict[int, Cut]:
    """A copy of them, for a user's may get more."""
    cuts = {} if cuts is None else cuts
    if not isinstance(cuts, Mapping) or not all(isinstance(one, Cut) for one in cuts.values()):
        raise ValueError(
            "`cuts` must be a dict from numbers of devices to `Cut`. Received: "
            f"cuts={cuts!r}. Give `{{2: Cut(size, copies, share)}}`."
        )
    return dict(cuts)


def check_division(placement: Any, modes: Sequence[str]) -> None:
    """A dict, for mode `"model"` only."""
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


def check_step(given: Any, batch_size: int) -> StepTime | None:
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
    if times[others[0]] > _NOISE * times[batch_size]:
        raise ValueError(
            "`step_seconds` must not be longer for fewer rows. Received: "
            f"step_seconds={given!r}. Give {{rows: seconds}}."
        )
    return StepTime.through(batch_size, times[batch_size], others[0], times[others[0]])


def check_given(model: keras.Model, inputs: Any, targets: Any, batch_size: int) -> None:
    """Enough rows, and a loss for the targets."""
    for name, arrays in {"inputs": inputs, "targets": targets}.items():
        shapes = [tuple(np.shape(part)) for part in keras.tree.flatten(arrays)]
        is_short = not shapes or any(not shape or shape[0] < batch_size for shape in shapes)
        if arrays is not None and is_short:
            raise ValueError(
                f"`{name}` must have at least batch_size={batch_size} rows, to time a step on a "
                f"whole batch. Received: {name} of the shapes {shapes}. Give {batch_size} rows or "
                "more."
            )
    if targets is not None and not model.compiled:
        raise ValueError(
            "`targets` are compared by the loss that a model is compiled with. Received: "
            f"`targets`, and model={model.name!r}, which is not compiled. Compile it, or leave "
            "`targets` out: then it is trained by the mean squared error."
        )


@contextlib.contextmanager
def targets_asked_for(model: keras.Model, targets: Any) -> Iterator[None]:
    """Scope of a model's steps: one of the model's own may fail where it gets no targets.

    Raises:
        ValueError: if it does.
    """
    try:
        yield
    except Exception as error:  # a user's step may raise anything; our error says it
        own = [one for one in ("train_step", "compute_loss") if one in engines.own_steps(model)]
        if targets is not None or not own:
            raise
        why = engines.reason_of(error).partition(". ")[0]
        raise ValueError(
            f"`targets` must be given if the model has its own `{own[0]}` that takes them. "
            f"Received: targets=None, and model={model.name!r}, whose `{own[0]}` fails without "
            f"them ({type(error).__name__}: {why}). Give `targets=y[:n]`, as many rows of your "
            "targets as `batch_size`."
        ) from error
