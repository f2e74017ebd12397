"""Are several devices worth it, on this machine or on another?"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.devices import choose_devices
from keras_multigpu.reports.advice_report import Advice
from keras_multigpu.reports.checks import check_built, check_counts
from keras_multigpu.reports.cuts import find_cut
from keras_multigpu.reports.designs import compare_designs
from keras_multigpu.reports.environment import are_virtual, count_cores, describe_environment
from keras_multigpu.reports.hosts import find_busiest
from keras_multigpu.reports.inputs import check_rows, make_inputs, take
from keras_multigpu.reports.links import PRESETS, Link, find_link, measure_link
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.prediction import Prediction, predict, widen, with_times
from keras_multigpu.reports.requests import check_hosts, check_request, known_step
from keras_multigpu.reports.sizes import find_sizes
from keras_multigpu.reports.step import Timing, measure_steps
from keras_multigpu.reports.transfers_report import TransfersReport
from keras_multigpu.reports.units import show_bytes, show_seconds
from keras_multigpu.reports.workload import Cut, Load, StepTime, Workload


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
    targets: Any = None,
    placement: Mapping[str, int] | None = None,
    cuts: Mapping[int, Cut] | None = None,
    counted: Sequence[TransfersReport] = (),
    processors: float | None = None,
    overlap: float = 0.0,
    steps: int = 10,
    devices_per_host: int | None = None,
    host_link: str | Link | None = None,
) -> Advice:
    """Says how long a training step takes on n devices, and whether they are worth it.

    Without a `link` the question is about this machine: on the devices that it has the step is
    timed. For devices that are not here it is predicted. A step is timed on one device, with the
    whole batch and with the smallest slice that is asked about; between these the time is taken to
    grow evenly with the rows. The bytes that have to cross are added at the speed of the link.

    A prediction is a range. One device does not show whether the part of a step that does not
    depend on the rows (launching operations, above all) is paid once or by each of n devices:
    these are the ends. Where the verdict depends on it, it says "Measure it".

    With `devices_per_host`, more devices than that are on several hosts, and what crosses between
    hosts comes to what crosses inside them. On JAX, whose processes add up gradients in a ring of
    hosts, that hardly grows with the hosts; on TensorFlow all of it goes over the link of the one
    driver, the inputs too, and grows with them. A note tells where that is no longer the right
    choice.

    Predictions leave out: the way of the batch from the host, which one device has as well; moving
    statistics; that of an embedding's gradient only the rows that were touched cross; and that
    copies and computations overlap (`overlap`).

    Args:
        model: a Keras model that is built. Afterwards it is as it was.
        batch_size: rows of a batch, on all devices together.
        n_gpus: the numbers of devices, here or elsewhere.
        modes: of `"data"`, `"tower"` (shared replicas), `"committee"` (mode `"tower"` with
            `replicas="independent"`) and `"model"`. The speed-up of towers is that over as many
            replicas on one device.
        link: a link between devices that are elsewhere: its name in `PRESETS` or `"nvlink"`, or a
            `Link`. `None` for this machine: the link between the first two devices is measured, or
            PCIe 4.0 assumed where there is only one.
        step_seconds: the time of a step on one device in seconds, in place of a measurement; or a
            dict from rows to seconds, with that of `batch_size` and that of a smaller batch. A
            single time is taken to be in proportion to the rows, which flatters many devices.
        speed: how many times as fast a device is as the one that is measured here.
        inputs: `batch_size` rows of inputs to measure with, in the structure that the model takes.
            Needed where the model does not tell their shapes, or which integers it takes. `None`
            draws random numbers; integers from all that an `Embedding`, say, knows.
        targets: as many rows of targets, to train by the model's own loss and metrics; `None`
            trains towards zeros by the mean squared error.
        placement: of mode `"model"`, as in `make_parallel`; `None` for the one that is chosen.
        cuts: how the model is spread in mode `"model"`, by the number of devices, where it is not
            to be found from the model.
        counted: what `transfers` has counted for parallel models of this one, with batches of this
            size: used in place of the bytes that follow from the model.
        processors: how many devices' worth of processors there really are, for virtual devices,
            which share them: 1 where one device by itself keeps the whole processor busy. `None`
            where each device is one; for virtual devices of this machine it is measured.
        overlap: the part of the copies that is hidden behind computations, from 0 to 1.
        steps: how many steps are timed of each, at least; short ones are timed more often.
        devices_per_host: how many devices a host has; `None` where one host has all of them.
        host_link: a host's link to the others, as `link`: `"ethernet25"`, say. Needed where there
            are several hosts.

    Returns:
        A report with a row for each mode and number of devices: the step, between what and what it
        is, what of it is spent on computing and moving, in seconds; what the busiest device sends
        and receives, the speed-up, the efficiency, and an estimate of the memory that a device
        needs: weights, gradients, the optimizer's state and the outputs of all layers on its rows.

    Raises:
        ValueError: if the model is not built, its inputs' shapes or ranges are not known, the
            inputs have fewer rows than a batch, a batch has fewer rows than there are devices, or
            an argument is out of range.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> advice = advise(
        ...     model, 64, n_gpus=(2,), link="ethernet10", step_seconds={64: 0.008, 32: 0.004}
        ... )
        >>> advice.predictions[0].compute_s, advice.predictions[0].devices
        (0.004, 2)
        >>> advice.verdicts["data"].split(":")[0]
        'Stay on one device'
    """
    counts = check_counts("n_gpus", n_gpus)
    given = find_link(link)
    between = check_hosts(devices_per_host, host_link, counts)
    check_request(
        counts, modes, batch_size, counted,
        speed=speed, processors=processors, overlap=overlap, steps=steps,
    )  # fmt: skip
    known = known_step(step_seconds, batch_size)
    check_built(model)
    rows = make_inputs(model, batch_size) if inputs is None else inputs
    batch = (check_rows("inputs", rows, batch_size), check_rows("targets", targets, batch_size))
    sizes = find_sizes(model, model(take(rows, 1)), take(rows, 1))
    cuts = dict(cuts or {})
    for count in counts if "model" in modes else ():
        if count > 1 and count not in cuts:
            cuts[count] = find_cut(model, count, batch_size, sizes, placement)
    measured, is_here = None, given is None and speed == 1 and between is None
    if known is None:
        here = [one for one in counts if 1 < one <= len(_pool())] if is_here else []
        fewer = max(batch_size // max(counts), 1)
        measured = measure_steps(
            model, batch, (batch_size, fewer), steps, dict.fromkeys(modes, here), placement
        )
        known = measured.step
        if processors is None and is_here and are_virtual(_pool()):
            processors = max(count_cores() / measured.cores, 1.0)
    partitions = engines.current().partitions
    step = StepTime(known.fixed_s / speed, known.row_s / speed)
    work = Workload(step, batch_size, sizes, partitions, processors, cuts, devices_per_host)
    used = given or (measure_link() if len(_pool()) > 1 else PRESETS["pcie4"])
    loads = {(mode, n): find_load(mode, work, n) for mode in modes for n in counts}
    loads |= _with_counts(loads, counted)
    found = [
        predict(mode, count, load, used, processors, overlap, between)
        for (mode, count), load in loads.items()
    ]
    if measured:
        found = [_with_times(one, measured.times, speed) for one in found]
    notes = compare_designs(work, counts, used, between) if between and "data" in modes else []
    if isinstance(step_seconds, numbers.Real):
        notes = [*notes, _ONE_TIME]
    settings = _describe(model, work, used, measured is None, speed, overlap)
    if between is not None:
        settings["hosts"] = f"{devices_per_host} devices each, linked by {between}"
    return Advice(found, settings=settings, notes=notes)


def _pool() -> tuple[str, ...]:
    """The devices that are here."""
    return choose_devices(None, None)


_ONE_TIME = (
    "The time of a step was given for one batch size: all of it is taken to get less with fewer "
    "rows, which flatters many devices. Give `step_seconds={rows: ..., fewer: ...}`."
)


def _with_times(
    one: Prediction, times: Mapping[tuple[str, int], Timing], speed: float
) -> Prediction:
    """A prediction with the times that were measured for it, if they were."""
    timing = times.get((one.mode, one.devices))
    alone = times.get((one.mode, 1)) or times["data", 1]
    if timing is None or speed != 1:
        return widen(one, times["data", 1].rounds)
    # Several towers are compared with as many on one device.
    work = one.devices if one.mode in ("tower", "committee") else 1
    return with_times(one, timing.rounds, work * alone.seconds)


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
        found["processors"] = f"those of {work.processors:.3g} devices"
    if overlap:
        found["overlap"] = f"{overlap:.0%} of the copies hidden"
    return found | describe_environment(_pool()[:1])
