"""How to train a model on n devices so that it fits, and is fast."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import finite_number, positive_integer, quantity
from keras_multigpu.devices import choose_devices
from keras_multigpu.graphs.graph import is_graph
from keras_multigpu.reports.advice_arguments import check_modes, known_step
from keras_multigpu.reports.environment import describe_environment
from keras_multigpu.reports.forms import read_bytes, show_bytes, show_seconds
from keras_multigpu.reports.interconnect import PRESETS, Link, find_link, measure_link
from keras_multigpu.reports.loads import SHARDS, Shard, find_load
from keras_multigpu.reports.plan_report import Choice, PlanReport
from keras_multigpu.reports.prediction import Cut, StepTime, Workload, predict
from keras_multigpu.reports.state import random_state_kept
from keras_multigpu.reports.subject import Subject

_MOST_HALVINGS = 4  # of a batch, whose parts' gradients are accumulated
_COLORS = re.compile(r"\x1b\[\d+m")
_WORTH_IT = 0.97  # of a step's memory: recomputing that saves less is no choice
_Way = tuple[str, Shard | None]  # a mode, and what it spreads
_AGAIN = 4 / 3  # a step computes forward once and backward twice; recomputed, forward twice


def plan(
    model: keras.Model,
    batch_size: int,
    n_gpus: int,
    *,
    memory: str | float,
    link: str | Link | None = None,
    step_seconds: float | Mapping[int, float] | None = None,
    speed: float = 1.0,
    inputs: Any = None,
    targets: Any = None,
    cuts: Mapping[int, Cut] | None = None,
    overlap: float = 0.0,
    steps: int = 10,
) -> PlanReport:
    """Finds the ways to train a model on n devices that fit into their memory, the fastest first.

    A way is a mode, what it spreads over the devices (`shard`), in how many parts a batch is
    computed, and whether activations are computed again in the backward pass (`keras.RematScope`)
    instead of kept. The parts of a batch have their gradients accumulated, so that an update still
    sees the whole batch. What compares or counts the rows of a batch (`BatchNormalization`,
    contrastive losses, means over masks or weights) sees the part. The devices need not be here.

    The memory is counted on one device, for the rows that a device gets and for fewer, as
    `reports.memory` does it. Times are predicted as `advise` does it: from steps on one device, and
    the bytes that cross.

    Args:
        model: a built model, compiled if it is to be counted with its own optimizer. Its state is
            restored afterwards.
        batch_size: rows of a batch, on all devices together.
        n_gpus: the number of devices.
        memory: the memory of a device: bytes, or a text such as `"24 GB"`. Leave some of it to the
            backend: a tenth, if nothing better is known.
        link: the link between the devices, as in `advise`.
        step_seconds: the time of a step on one device in seconds, as in `advise`.
        speed: how many times as fast a device is as the one that is measured here.
        inputs: `batch_size` rows of inputs, as in `advise`.
        targets: as many rows of targets, as in `advise`.
        cuts: how mode `"model"` divides the model, by the number of devices. On JAX mode `"model"`
            is only considered with it.
        overlap: the share of the copies that computations hide, from 0 to 1.
        steps: the least number of steps to time.

    Returns:
        A report with a row for each way. `plan.best` has the options of the fastest one that fits:
        `make_parallel(model, n, **plan.best)`.

    Raises:
        ValueError: if the model is not built, input shapes or valid integers are unknown, the
            inputs have fewer rows than a batch, a batch has fewer rows than there are devices, or
            an argument is out of range.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> model.compile("adam", "mse")
        >>> found = plan(model, 64, 2, memory="1 GB", link="nvlink4", step_seconds=0.01)
        >>> found.best["mode"]
        'data'
    """
    count = positive_integer("n_gpus", n_gpus)
    batch_size = positive_integer("batch_size", batch_size)
    limit, given = read_bytes("memory", memory), find_link(link)
    check_modes(("data",), (count,), batch_size)
    steps, speed = positive_integer("steps", steps), quantity("speed", speed)
    hint = "Give 0 if copies and computations take turns."
    finite_number("overlap", overlap, "a share, from 0 to 1", lambda one: 0 <= one <= 1, hint)
    known = known_step(step_seconds, batch_size)
    subject = Subject.make(model, batch_size, inputs, targets)
    pool = choose_devices(None, None)
    used = given or (measure_link() if len(pool) > 1 else PRESETS["pcie4"])
    machine = _Machine(count, limit, used, overlap)
    rows = math.ceil(batch_size / count)
    step = (known or subject.time((rows, max(rows // 2, 1)), steps, {}).step).sped_up(speed)
    shards, notes = _shards(model, count)
    ways = [("data", shard) for shard in shards]
    if count > 1 and (count in (cuts or {}) or _has_stages(model)):
        ways.append(("model", None))
    plain = _count(subject, count, ways)
    choices = list(_choices(plain, step, machine, ways, cuts))
    recomputing, why_not = _recomputed(subject, plain, count, ways)
    if recomputing:
        again = step.sped_up(1 / _AGAIN)
        choices += _choices(recomputing, again, machine, ways, cuts, remat=True)
    notes += why_not + _say_unknown(plain["data"])
    settings = {
        "model": model.name,
        "weights": show_bytes(subject.sizes.weights),
        "batch size": batch_size,
        "memory of a device": show_bytes(limit),
        "link": str(used),
        "step on one device": f"{show_seconds(step.fixed_s)} + {1e6 * step.row_s:.4g} us a row",
        **describe_environment(pool[:1]),
    }
    return PlanReport(choices, count, settings=settings, notes=notes)


@dataclasses.dataclass(frozen=True)
class _Machine:
    """The devices in question."""

    devices: int
    limit: int
    link: Link
    overlap: float


def _shards(model: keras.Model, count: int) -> tuple[list[Shard | None], list[str]]:
    """What this backend can spread, and why it leaves out the rest."""
    runner = engines.current().data_runner
    found: dict[tuple[float, float], Shard] = {}
    notes = []
    for name in SHARDS:
        options = {"shard": name}
        request = engines.Request("data", model, choose_devices(None, None)[:1], options)
        try:
            runner.check(request)
            kept = runner.fullest(model, count, name)
            found.setdefault(kept, Shard(name, *kept))
        except ValueError as error:
            notes.append(f"shard={name!r} is left out: {str(error).partition('. ')[0]}.")
    return [None, *found.values()], notes


def _has_stages(model: keras.Model) -> bool:
    """Whether mode `"model"` puts layers on devices, so that it can be predicted."""
    return not engines.current().partitions and is_graph(model)


def _count(subject: Subject, devices: int, ways: Sequence[_Way]) -> Mapping[str, Subject]:
    """The subject with counted sizes, by mode: for a slice of the batch, or for all its rows."""
    rows = {"data": math.ceil(subject.batch_size / devices), "model": subject.batch_size}
    return {
        mode: subject.counted((rows[mode], max(rows[mode] // 2**_MOST_HALVINGS, 1)))
        for mode in dict(ways)
    }


def _recomputed(
    subject: Subject, plain: Mapping[str, Subject], devices: int, ways: Sequence[_Way]
) -> tuple[Mapping[str, Subject], list[str]]:
    """The same with layers made in a `keras.RematScope`, or why they are left out."""
    model = subject.model
    if not is_graph(model):
        return {}, ["Recomputing is left out: only functional and Sequential models are copied."]
    with random_state_kept():
        copy = keras.models.clone_model(model, clone_function=_recomputing)
    if model.compiled:
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        copy.compile(optimizer, model.loss, jit_compile=model.jit_compile)
    try:
        found = _count(dataclasses.replace(subject, model=copy), devices, ways)
    except ValueError as error:  # Keras can't recompute all layers on TensorFlow
        reason = " ".join(_COLORS.sub("", str(error)).partition("Arguments received")[0].split())
        return {}, [f"Recomputing activations is left out, because Keras can't do it: {reason}"]
    if _step_bytes(found["data"]) > _WORTH_IT * _step_bytes(plain["data"]):
        return {}, ["Recomputing activations (`keras.RematScope`) saves hardly any memory."]
    return found, []


def _step_bytes(subject: Subject) -> float:
    """What a step needs for a slice of the batch, beside the state."""
    return subject.sizes.work + subject.rows * (subject.sizes.activations or 0)


def _recomputing(layer: keras.Layer) -> keras.Layer:
    """A copy of a layer, whose intermediate results are computed again when they are needed."""
    with keras.RematScope("full"):
        return type(layer).from_config(layer.get_config())


def _say_unknown(subject: Subject) -> list[str]:
    if not subject.unknown:
        return []
    return [
        f"The size of {subject.unknown} tensors is known only when the step runs: they are left "
        "out, and a step needs more than this."
    ]


def _choices(
    subjects: Mapping[str, Subject],
    step: StepTime,
    machine: _Machine,
    ways: Sequence[_Way],
    cuts: Mapping[int, Cut] | None,
    remat: bool = False,
) -> Iterator[Choice]:
    """For each way, the least number of parts of a batch that fits; else the largest."""
    for mode, shard in ways:
        subject, choice = subjects[mode], None
        for parts in _divisions(subject.batch_size, machine.devices):
            part = dataclasses.replace(subject, batch_size=subject.batch_size // parts)
            found = part.find_cuts([machine.devices], cuts) if mode == "model" else {}
            choice = _choose(part, step, machine, (mode, shard), found, parts, remat)
            if choice.fits or (mode == "model" and cuts):  # which are for a whole batch
                break
        if choice is not None:
            yield choice


def _divisions(batch_size: int, devices: int) -> list[int]:
    """The numbers of equal parts of a batch that give each device as many rows."""
    powers = [2**power for power in range(1, _MOST_HALVINGS + 1)]
    return [1, *(one for one in powers if batch_size % (one * devices) == 0)]


def _choose(
    part: Subject,
    step: StepTime,
    machine: _Machine,
    way: _Way,
    cuts: Mapping[int, Cut],
    parts: int,
    remat: bool,
) -> Choice:
    """A way to train on one part of a batch after the other."""
    (mode, shard), sizes = way, part.sizes
    if parts > 1:  # the sums of the gradients are kept like slots
        sizes = dataclasses.replace(sizes, slots=sizes.slots + sizes.gradients)
    by_compiler = engines.current().partitions
    work = Workload(step, part.batch_size, sizes, by_compiler, cuts=cuts)
    load = find_load(mode, work, machine.devices, shard)
    found = predict(mode, machine.devices, load, machine.link, overlap=machine.overlap)
    fits = load.memory is not None and load.memory <= machine.limit
    name = None if shard is None else shard.name
    return Choice(found, name, parts, part.batch_size, remat, fits)
