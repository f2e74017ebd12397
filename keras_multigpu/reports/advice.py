"""Are several devices worth it, on this machine or on another?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.devices import choose_devices
from keras_multigpu.reports.advice_report import Advice, show_bytes, show_seconds
from keras_multigpu.reports.checks import check_built, check_count, check_counts, check_quantity
from keras_multigpu.reports.cuts import find_cut
from keras_multigpu.reports.designs import compare_designs
from keras_multigpu.reports.environment import describe_environment
from keras_multigpu.reports.links import PRESETS, Link, find_link, measure_link
from keras_multigpu.reports.loads import check_mode, find_load
from keras_multigpu.reports.prediction import Cut, Load, StepTime, Workload, find_busiest, predict
from keras_multigpu.reports.sizes import find_sizes
from keras_multigpu.reports.step import make_inputs, measure_step, take
from keras_multigpu.reports.transfers import TransfersReport


def advise(
    model: keras.Model,
    batch_size: int,
    n_gpus: Sequence[int] = (1, 2, 4, 8),
    *,
    modes: Sequence[str] = ("data",),
    link: str | Link | None = None,
    step_seconds: float | Mapping[int, float] | None = None,
    speed: float = 1.0,
    inputs: Any = None,
    placement: Mapping[str, int] | None = None,
    cuts: Mapping[int, Cut] | None = None,
    counted: Sequence[TransfersReport] = (),
    processors: float | None = None,
    overlap: float = 0.0,
    steps: int = 10,
    devices_per_host: int | None = None,
    host_link: str | Link | None = None,
) -> Advice:
    """Predicts how long a training step takes on n devices, and says whether they are worth it.

    A step is timed on one device, with the whole batch and with the smallest slice that is asked
    about; between these the time is taken to grow evenly with the rows. To that come the bytes that
    have to cross, which follow from the model and the mode, at the speed of the link. So the
    devices need not be here.

    With `devices_per_host`, more devices than that are on several hosts, and what crosses between
    hosts comes to what crosses inside them. On JAX, whose processes add up gradients in a ring of
    hosts, that hardly grows with the hosts; on TensorFlow all of it goes over the link of the one
    driver, the inputs too, and grows with them. A note tells where that is no longer the right
    choice.

    What is not counted: the way of the batch from the host, which one device has as well; moving
    statistics; that of an embedding's gradient only the rows that were touched cross; and that
    copies and computations overlap (`overlap`).

    Args:
        model: a Keras model that is built. Afterwards it is as it was.
        batch_size: rows of a batch, on all devices together.
        n_gpus: the numbers of devices, here or elsewhere.
        modes: of `"data"`, `"tower"` (shared replicas), `"committee"` (mode `"tower"` with
            `replicas="independent"`) and `"model"`. The speed-up of towers is that over as many
            replicas on one device.
        link: a link between devices: its name in `PRESETS` or `"nvlink"`, a `Link`, or `None`, to
            measure the one between the first two devices, or to assume PCIe 4.0 where there is
            only one.
        step_seconds: the time of a step on one device in seconds, in place of a measurement; or a
            dict from rows to seconds, with that of `batch_size` and that of a smaller batch. A
            single time is taken to be in proportion to the rows, which flatters many devices.
        speed: how many times as fast a device is as the one that is measured here.
        inputs: `batch_size` rows of inputs to measure with, in the structure that the model takes.
            Needed where the model does not tell their shapes. `None` takes random numbers, and
            zeros for integers.
        placement: of mode `"model"`, as in `make_parallel`; `None` for the one that is chosen.
        cuts: how the model is spread in mode `"model"`, by the number of devices, where it is not
            to be found from the model.
        counted: what `transfers` has counted for parallel models of this one, with batches of this
            size: used in place of the bytes that follow from the model.
        processors: how many devices' worth of processors there really are, for virtual devices,
            which share them: 1 where one device by itself keeps the whole processor busy. `None`
            where each device is one.
        overlap: the part of the copies that is hidden behind computations, from 0 to 1.
        steps: how many steps are timed on either batch.
        devices_per_host: how many devices a host has; `None` where one host has all of them.
        host_link: a host's link to the others, as `link`: `"ethernet25"`, say. Needed where there
            are several hosts.

    Returns:
        A report with a row for each mode and number of devices: the step, what of it is spent on
        computing and moving, in seconds; what the busiest device sends and receives, the
        speed-up, the efficiency, and an estimate of the memory that a device needs: weights,
        gradients, the optimizer's state and the outputs of all layers on its rows.

    Raises:
        ValueError: if the model is not built, its inputs' shapes are not known, or an argument is
            out of range.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> advice = advise(
        ...     model, 64, n_gpus=(2,), link="ethernet10", step_seconds={64: 0.008, 32: 0.005}
        ... )
        >>> advice.predictions[0].compute_s, advice.predictions[0].devices
        (0.005, 2)
        >>> advice.verdicts["data"].split(":")[0]
        'Stay on one device'
    """
    counts = check_counts("n_gpus", n_gpus)
    given, cuts = find_link(link), dict(cuts or {})
    between = _check_hosts(devices_per_host, host_link, counts)
    for mode in modes:
        check_mode(mode)
    _check_numbers(batch_size, speed, processors, overlap, steps)
    _check_counted(counted, batch_size)
    known = _known_step(step_seconds, batch_size)
    check_built(model)
    rows = make_inputs(model, batch_size) if inputs is None else inputs
    sizes = find_sizes(model, model(take(rows, 1)), take(rows, 1))
    for count in counts if "model" in modes else ():
        if count > 1 and count not in cuts:
            cuts[count] = find_cut(model, count, batch_size, sizes, placement)
    fewer = max(batch_size // max(counts), 1)
    step = known or measure_step(model, rows, batch_size, fewer, steps)
    work = Workload(
        StepTime(step.fixed_s / speed, step.row_s / speed),
        batch_size,
        sizes,
        engines.current().partitions,
        processors,
        cuts,
        devices_per_host,
    )
    used = given or _link_here()
    found = {(mode, n): find_load(mode, work, n) for mode in modes for n in counts}
    found |= _with_counts(found, counted)
    predictions = [
        predict(mode, count, load, used, processors, overlap, between)
        for (mode, count), load in found.items()
    ]
    settings = _describe(model, work, used, known is not None, speed, overlap)
    if between is not None:
        settings["hosts"] = f"{devices_per_host} devices each, linked by {between}"
    notes = compare_designs(work, counts, used, between) if between and "data" in modes else ()
    return Advice(predictions, settings=settings, notes=notes)


def _check_hosts(per_host: Any, host_link: Any, counts: Sequence[int]) -> Link | None:
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
    reports = counted if isinstance(counted, Sequence) else (counted,)
    fits = [isinstance(one, TransfersReport) and one.batch_size == batch_size for one in reports]
    if not isinstance(counted, Sequence) or not all(fits):
        given = [getattr(one, "batch_size", type(one).__name__) for one in reports]
        raise ValueError(
            "`counted` must be a sequence of what `transfers` returns, for batches of "
            f"batch_size={batch_size} rows. Received: {given}. Give "
            "`[transfers(parallel, batch), ...]` with batches of that size."
        )


def _with_counts(
    loads: Mapping[tuple[str, int], Load], counted: Sequence[TransfersReport]
) -> dict[tuple[str, int], Load]:
    """The loads for which transfers were counted, with these."""
    found = {}
    for report in counted:
        key = (str(report.mode), len(report.devices))
        if key in loads:
            between = [one for one in report.training if one.source in report.devices]
            traffic = find_busiest(
                [one for one in between if one.kind != "inputs"],
                duplex=engines.current().partitions,
            )
            found[key] = dataclasses.replace(loads[key], traffic=traffic)
    return found


def _check_numbers(batch_size: Any, speed: Any, processors: Any, overlap: Any, steps: Any) -> None:
    check_count("batch_size", batch_size)
    check_count("steps", steps)
    check_quantity("speed", speed)
    if processors is not None:
        check_quantity("processors", processors)
    if check_quantity("overlap", overlap, zero=True) > 1:
        raise ValueError(
            "`overlap` must be a part, from 0 to 1. Received: "
            f"overlap={overlap!r}. Give 0 where copies and computations take turns."
        )


def _known_step(given: Any, batch_size: int) -> StepTime | None:
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


def _link_here() -> Link:
    """The link between the first two devices, or the one that is assumed where there is none."""
    return measure_link() if len(choose_devices(None, None)) > 1 else PRESETS["pcie4"]


def _describe(
    model: keras.Model, work: Workload, link: Link, is_given: bool, speed: float, overlap: float
) -> dict[str, Any]:
    """What a reader must know of the predictions."""
    step = work.step
    source = "given" if is_given else "measured"
    found: dict[str, Any] = {
        "model": model.name,
        "weights": f"{show_bytes(work.sizes.weights)} in {work.sizes.tensors} variables",
        "batch size": work.batch_size,
        f"step on one device, {source}": f"{show_seconds(step.fixed_s)} + "
        f"{work.batch_size} rows x {1e6 * step.row_s:.4g} us",
        "link": str(link),
    }
    if speed != 1:
        found["speed"] = f"{speed:g} times that of the device here"
    if work.processors is not None:
        found["processors"] = f"those of {work.processors:g} devices"
    if overlap:
        found["overlap"] = f"{overlap:.0%} of the copies hidden"
    return found | describe_environment(choose_devices(None, None)[:1])
