"""Are several devices worth it, on this machine or on another?"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import device_counts, number_of
from keras_multigpu.devices import choose_devices
from keras_multigpu.reports.advice_report import Advice
from keras_multigpu.reports.interconnect import Link
from keras_multigpu.reports.loads import check_modes, find_busiest
from keras_multigpu.reports.prediction import Prediction, Traffic
from keras_multigpu.reports.subject import Subject
from keras_multigpu.reports.timing import Measured
from keras_multigpu.reports.transfers_report import TransfersReport
from keras_multigpu.reports.workload import Cut

_ONE_TIME = (
    "You gave the step time of one batch size, so all of it is taken to shrink with the rows. That "
    "flatters many devices. Better give `step_seconds={rows: ..., fewer: ...}`."
)


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

    Without a `link` the question is about this machine: the devices that it has are timed, and
    others are predicted. A prediction starts from the times on one device, of the whole batch and
    of the smallest slice in question; in between, the time grows evenly with the rows. To this it
    adds the time for the bytes that cross.

    A prediction is a range. Part of a step doesn't depend on the rows (above all, launching
    operations), and one device can't show whether n devices pay it once or each: these are the ends
    of the range. If the verdict depends on it, the advice is "Measure it". Rounds that differ
    widen the range.

    Several hosts have a process each (`cluster.join`), which sum the gradients in a ring. One
    driver of all (`cluster.connect`) is slower: `docs/at_scale.md` has figures.

    Predictions leave out: copying the batch from the host, which one device needs as well; moving
    statistics; sparse gradients of embeddings (whole ones are counted; on TensorFlow Adam adds up
    their squares apart, so that a small table's cross twice); and any overlap of copies
    with computations (see `overlap`).

    Args:
        model: a built Keras model. Its state is restored afterwards.
        batch_size: rows of a batch, on all devices together.
        n_gpus: the numbers of devices, here or elsewhere.
        modes: of `"data"`, `"tower"` (shared replicas), `"committee"` (mode `"tower"` with
            `replicas="independent"`) and `"model"`. Towers are compared with as many replicas on
            one device.
        link: a link between devices that are elsewhere: a name in `PRESETS`, `"nvlink"`, or a
            `Link`. `None` asks about this machine: the link between the first two devices is
            measured, or PCIe 4.0 assumed if there is only one device.
        step_seconds: the time of a step on one device in seconds, instead of a measurement; or a
            dict from rows to seconds, for `batch_size` and for a smaller batch. A single time is
            taken to be proportional to the rows, which flatters many devices.
        speed: how many times as fast a device is as the one that is measured here.
        inputs: `batch_size` rows of inputs to measure with, in the model's structure. `None` draws
            random numbers, and for an `Embedding`, say, any of its valid integers.
        targets: as many rows of targets, to train with the model's own loss and metrics; `None`
            trains towards zeros by the mean squared error, or leaves it to the model's own step.
        placement: for mode `"model"`, as in `make_parallel`; `None` for the default one.
        cuts: how mode `"model"` divides the model, by the number of devices, if that can't be found
            from the model.
        counted: reports of `transfers` for parallel versions of this model, with batches of this
            size. They replace the estimated bytes.
        processors: the number of devices that the processors could keep busy, for virtual devices,
            which share them: 1 if one device already uses the whole processor. `None` if each
            device has its own; for virtual devices of this machine it is measured.
        overlap: the share of the copies that computations hide, from 0 to 1.
        steps: the least number of steps to time; short steps are repeated more often.
        devices_per_host: the devices of a host; `None` if one host has all of them.
        host_link: a host's link to the others, as `link`; needed if there are several hosts.

    Returns:
        A report with a row for each mode and number of devices: the likely step and its range, the
        part spent computing and moving, in seconds; the bytes that the busiest device sends and
        receives; the speed-up and the efficiency. What a device holds `plan` and `memory` count.

    Raises:
        ValueError: if the model is not built, input shapes or valid integers are unknown, the
            inputs have fewer rows than a batch, nothing is left because a batch has fewer rows than
            there are devices, or an argument is out of range.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> advice = advise(
        ...     model, 64, n_gpus=(2,), link="ethernet10", step_seconds={64: 0.002, 32: 0.001}
        ... )
        >>> advice.predictions[0].compute_s, advice.predictions[0].devices
        (0.001, 2)
        >>> advice.verdicts["data"].split(":")[0]
        'Stay on one device'
    """
    counts = device_counts("n_gpus", n_gpus)
    check_modes(modes, placement)
    subject = Subject(
        model, batch_size, counts, modes, link=link, step_seconds=step_seconds, speed=speed,
        inputs=inputs, targets=targets, cuts=cuts, overlap=overlap, steps=steps,
        placement=placement, processors=processors, devices_per_host=devices_per_host,
        host_link=host_link,
    )  # fmt: skip
    if subject.cuts and "model" not in modes:
        raise ValueError(
            f"`cuts` are for mode 'model'. Received: cuts={cuts!r} and modes={tuple(modes)!r}. Add "
            "'model' to `modes`, or leave `cuts` out."
        )
    asked = [(mode, n) for mode in modes for n in counts if (mode, n) not in subject.left_out]
    traffic = _count_traffic(counted, model, batch_size, asked)
    most = len(choose_devices(None, None)) if subject.is_here else 1
    here = {one: [n for mode, n in asked if mode == one and 1 < n <= most] for one in modes}
    subject.measure(batch_size, max(batch_size // max(counts), 1), here)
    found = [subject.predict(*one, traffic=traffic.get(one)) for one in asked]
    if subject.measured and speed == 1:
        found = [_with_times(one, subject.measured) for one in found]
    notes = [*([_ONE_TIME] if isinstance(step_seconds, numbers.Real) else []), *subject.doubts]
    return Advice(found, settings=subject.describe(), notes=notes)


def _count_traffic(
    counted: Any, model: keras.Model, batch_size: int, asked: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Traffic]:
    """What was counted on the busiest device, without the inputs, by mode and number of devices."""
    reports = counted if isinstance(counted, Sequence) else (counted,)
    wrong = [text for one in reports if (text := _is_of_others(one, model, batch_size))]
    if wrong:
        raise ValueError(
            "`counted` must be reports that `transfers` returned for training steps of "
            f"{model.name!r} on batches of batch_size={batch_size}. Received: "
            f"{', '.join(wrong)}. Give `[transfers(parallel, batch), ...]` of a compiled parallel "
            "model."
        )
    found = {}
    for one in reports:
        moved = [each for each in one.training if each.kind != "inputs"]
        sent = [each for each in moved if each.source in one.devices]
        busiest = find_busiest(sent, duplex=engines.current().partitions)
        found[one.mode, len(one.devices)] = busiest
    others = [
        f"mode {mode!r} on {number_of(count, 'device')}" for mode, count in {*found} - {*asked}
    ]
    if others:
        raise ValueError(
            "`counted` must be reports for modes and numbers of devices that are asked about. "
            f"Received: {', '.join(sorted(others))}. Add these to `modes` and `n_gpus`, or leave "
            "the reports out."
        )
    return found


def _is_of_others(one: Any, model: keras.Model, batch_size: int) -> str:
    """What a report is of, if not of this model's training; `""` if it is."""
    if not isinstance(one, TransfersReport):
        return f"a {type(one).__name__}"
    if one.batch_size != batch_size:
        return f"one of batches of {number_of(one.batch_size or 0, 'row')}"
    name = one.settings.get("model", model.name)
    if name != model.name:
        return f"one of the model {name!r}"
    return "one of predictions only" if one.prediction and not one.training and one.least else ""


def _with_times(one: Prediction, measured: Measured) -> Prediction:
    """A prediction with the times that were measured for it, if any."""
    # On one device mode "model" is the model alone, as in mode "data".
    times = {("model", 1, measured.rows): measured.alone, **measured.times}
    timing = times.get((one.mode, one.devices, measured.rows))
    if timing is None:
        return one
    alone = times.get((one.mode, 1, measured.rows), measured.alone)
    # Towers are compared with as many on one device.
    work = one.devices if one.mode in ("tower", "committee") else 1
    return one.with_times(timing.rounds, [work * seconds for seconds in alone.rounds])
