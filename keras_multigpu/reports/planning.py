"""How to train a model on n devices so that it fits, and is fast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import positive_integer
from keras_multigpu.devices import choose_devices
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.graphs.graph import is_graph
from keras_multigpu.reports.forms import describe_environment, read_bytes, show_bytes, show_seconds
from keras_multigpu.reports.interconnect import Link, default_link, find_link
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.plan_report import Choice, PlanReport
from keras_multigpu.reports.prediction import Cut, Sizes, StepTime, predict
from keras_multigpu.reports.recomputing import count_recomputed
from keras_multigpu.reports.sizes import find_cut
from keras_multigpu.reports.subject import Subject
from keras_multigpu.reports.timing import measure_steps
from keras_multigpu.reports.workload import Shard, Workload

SHARDS = ("weights", "optimizer")
_MOST_HALVINGS = 4  # of a batch, whose parts' gradients are accumulated
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

    One device is always among the ways: more are not always faster. A way is a mode, what it
    spreads over the devices (`shard`), in how many parts a batch is computed, and whether
    activations are computed again in the backward pass (`keras.RematScope`), not kept. The parts
    of a batch have their gradients accumulated, so that an update still sees the whole batch. What
    compares or counts the rows of a batch (`BatchNormalization`, contrastive losses, means over
    masks or weights) sees the part. The devices need not be here.

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
        A report with a row for each way. `plan.best` has the arguments of the fastest one that
        fits: `make_parallel(model, **plan.best)`.

    Raises:
        ValueError: as `advise` does, or if `memory` is no number of bytes.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> model.compile("adam", "mse")
        >>> found = plan(model, 64, 2, memory="1 GB", link="nvlink4", step_seconds=0.01)
        >>> found.best
        {'n_gpus': 2, 'mode': 'data'}
    """
    count = positive_integer("n_gpus", n_gpus)
    limit, given = read_bytes("memory", memory), find_link(link)
    subject = Subject(
        model, batch_size, (count,), ("data",), inputs=inputs, targets=targets,
        step_seconds=step_seconds, speed=speed, overlap=overlap, steps=steps,
    )  # fmt: skip
    ways, notes = _find_ways(model, count, cuts or {})
    search = _Search(subject, ways, count, limit, given or default_link(), overlap, cuts or {})
    rows = (search.rows, max(search.rows // 2, 1))
    step = subject.known or measure_steps(model, subject.batch, rows, subject.steps, {}).step
    step = step.sped_up(subject.speed)
    plain = search.count(model)
    choices = list(search.choose(plain, step))
    recomputed, why_not = count_recomputed(model, search.count, plain, search.rows)
    choices += search.choose(recomputed, step.sped_up(1 / _AGAIN), remat=True)
    notes += why_not
    unknown = plain[search.rows].unknown
    if unknown:
        notes.append(
            f"The size of {unknown} tensors is known only when the step runs: they "
            "are left out, and a step needs more than this."
        )
    settings = {
        "model": model.name,
        "weights": show_bytes(subject.sizes.weights),
        "batch size": subject.batch_size,
        "memory of a device": show_bytes(limit),
        "link": str(search.link),
        "step on one device": f"{show_seconds(step.fixed_s)} + {1e6 * step.row_s:.4g} us a row",
        **describe_environment(choose_devices(None, None)[:1]),
    }
    return PlanReport(choices, count, settings=settings, notes=notes)


@dataclasses.dataclass(frozen=True)
class _Way:
    """A mode, what it spreads, and on how many devices."""

    mode: str
    shard: Shard | None
    devices: int


def _find_ways(
    model: keras.Model, count: int, cuts: Mapping[int, Cut]
) -> tuple[list[_Way], list[str]]:
    """The ways to use a number of devices, or one of them, and why others are left out."""
    ways = [_Way("data", None, 1)]
    notes: list[str] = []
    if count > 1:
        shards, notes = _find_shards(model, count)
        ways += [_Way("data", shard, count) for shard in shards]
        if count in cuts or (is_graph(model) and not engines.current().partitions):
            ways.append(_Way("model", None, count))
    return ways, notes


def _find_shards(model: keras.Model, count: int) -> tuple[list[Shard | None], list[str]]:
    """What this backend can spread, and why it leaves out the rest."""
    runner = engines.current().data_runner
    found: list[Shard] = []
    notes = []
    for name in SHARDS:
        request = engines.Request("data", model, choose_devices(None, None)[:1], {"shard": name})
        try:
            runner.check(request)
            shard = _shard_of(name, runner.fullest(model, count, name))
            if all(dataclasses.replace(one, name=name) != shard for one in found):
                found.append(shard)
        except ValueError as error:
            notes.append(f"shard={name!r} is left out: {str(error).partition('. ')[0]}.")
    return [None, *found], notes


def _shard_of(name: str, kept: engines.Kept) -> Shard:
    """A value of `shard`, from what the fullest device keeps with it."""
    tables = [one for one in kept.tables if one.trainable]
    return Shard(
        name,
        kept.weights,
        kept.slots,
        tables=variables_bytes(tables),
        table_gradients=variables_bytes(one for one in tables if not one.names_rows_once),
        sums=sum(variables_bytes([one]) // one.shape[0] for one in tables),
    )


@dataclasses.dataclass(frozen=True)
class _Search:
    """The ways in question, and the devices."""

    subject: Subject
    ways: Sequence[_Way]
    devices: int
    limit: int
    link: Link
    overlap: float
    cuts: Mapping[int, Cut]

    @property
    def rows(self) -> int:
        """The rows of a device in mode `"data"`."""
        return math.ceil(self.subject.batch_size / self.devices)

    def _rows_of(self, way: _Way) -> int:
        """The rows of a device."""
        is_sliced = way.mode == "data" and way.devices > 1
        return self.rows if is_sliced else self.subject.batch_size

    def count(self, model: keras.Model) -> dict[int, Sizes]:
        """The counted sizes of a copy of the model, by the rows of a device."""
        found = {}
        for rows in {self._rows_of(way) for way in self.ways}:
            least = max(rows // 2**_MOST_HALVINGS, 1)
            found[rows] = self.subject.count_sizes(model, rows, least)
        return found

    def choose(
        self, sizes: Mapping[int, Sizes], step: StepTime, *, remat: bool = False
    ) -> Iterator[Choice]:
        """For each way, the least number of equal parts of a batch that fits; else the largest."""
        powers = [2**power for power in range(1, _MOST_HALVINGS + 1)]
        for way in self.ways if sizes else ():
            equal = [one for one in powers if self.subject.batch_size % (one * way.devices) == 0]
            for parts in (1, *equal):
                choice = self._choose(way, sizes[self._rows_of(way)], step, parts, remat)
                is_given = way.mode == "model" and way.devices in self.cuts  # for a whole batch
                if choice.fits or is_given:
                    break
            yield choice

    def _choose(self, way: _Way, sizes: Sizes, step: StepTime, parts: int, remat: bool) -> Choice:
        """A way to train on one part of a batch after the other."""
        rows, cuts, shard = self.subject.batch_size // parts, dict(self.cuts), way.shard
        if way.mode == "model" and way.devices not in cuts:
            cuts[way.devices] = find_cut(self.subject.model, way.devices, rows, sizes)
        if parts > 1:  # the sums of the gradients are kept like slots
            sizes = dataclasses.replace(sizes, slots=sizes.slots + sizes.gradients)
        by_compiler = engines.current().partitions
        work = Workload(step, rows, sizes, by_compiler, cuts=cuts, shard=shard)
        load = find_load(way.mode, work, way.devices)
        found = predict(way.mode, way.devices, load, self.link, overlap=self.overlap)
        fits = load.memory is not None and load.memory <= self.limit
        return Choice(found, shard.name if shard else None, parts, rows, remat, fits)
