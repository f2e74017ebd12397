"""What `advise` and `plan` share: a model, a batch and devices; how long a step takes there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_model, finite_number, positive_integer, quantity
from keras_multigpu.devices import choose_devices
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.forms import (
    are_virtual,
    count_cores,
    describe_environment,
    show_bytes,
    show_seconds,
)
from keras_multigpu.reports.inputs import check_given, make_inputs
from keras_multigpu.reports.interconnect import Link, default_link
from keras_multigpu.reports.loads import check_mode, find_load
from keras_multigpu.reports.memory_report import MemoryReport, memory
from keras_multigpu.reports.prediction import Prediction, Traffic, predict
from keras_multigpu.reports.sizes import find_cut, find_sizes
from keras_multigpu.reports.timing import (
    Measured,
    accumulate,
    compile_for,
    measure_steps,
    take_rows,
)
from keras_multigpu.reports.workload import Cut, Sizes, StepTime, Workload

_NOISE = 1.1  # by as much may two measurements of one time differ


@dataclasses.dataclass
class Subject:
    """A built model, a batch to train it on, and the devices in question.

    The arguments are those of `advise`, which are checked here. Then `inputs` are there, `sizes`
    are estimated, and `step` is the time of a step on one such device, if it is given.
    """

    model: keras.Model
    batch_size: int
    counts: Sequence[int]
    modes: Sequence[str]
    given_link: Link | None
    step_seconds: float | Mapping[int, float] | None
    speed: float
    inputs: Any
    targets: Any
    cuts: Mapping[int, Cut]
    overlap: float
    steps: int
    placement: Mapping[str, int] | None = None
    per_host: int | None = None
    host_link: Link | None = None
    processors: float | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        self.batch_size = positive_integer("batch_size", self.batch_size)
        _check_modes(self.modes, self.counts, self.batch_size)
        positive_integer("steps", self.steps)
        quantity("speed", self.speed)
        hint = "Give 0 if copies and computations take turns."
        share = "a share, from 0 to 1"
        finite_number("overlap", self.overlap, share, lambda one: 0 <= one <= 1, hint)
        known = _known_step(self.step_seconds, self.batch_size)
        self.step = known and known.sped_up(self.speed)
        check_model(self.model, built=True)
        self.cuts = _checked_cuts(self.cuts)
        _check_placement(self.placement, self.modes)
        if self.inputs is None:
            self.inputs = make_inputs(self.model, self.batch_size)
        check_given(self.model, self.inputs, self.targets, self.batch_size)
        one_row = take_rows(self.inputs, 1)
        self.sizes = find_sizes(self.model, self.model(one_row), one_row)
        for count in self.counts if "model" in self.modes else ():
            if count > 1 and count not in self.cuts:
                cut = self.find_cut(count, self.batch_size, self.sizes)
                self.cuts = {**self.cuts, count: cut}

    @property
    def is_here(self) -> bool:
        """Whether devices of this machine are meant, which can be timed."""
        return self.given_link is None and self.speed == 1 and self.host_link is None

    @functools.cached_property
    def link(self) -> Link:
        """The link that the user gave, or that of this machine."""
        return self.given_link or default_link()

    def measure(self, rows: int, fewer: int, here: Mapping[str, Sequence[int]]) -> None:
        """Times steps on `rows` rows and on fewer, on devices that are `here`, if it has to."""
        if self.step is None:
            batch, asked = (self.inputs, self.targets), ((rows, fewer), self.steps, here)
            self.measured = measure_steps(self.model, batch, *asked, self.placement)
            self.step = self.measured.step.sped_up(self.speed)
            if self.processors is None and self.is_here and are_virtual(choose_devices(None, None)):
                cores = count_cores()
                self.processors = min(max(cores / self.measured.cores, 1.0), cores)

    def find_cut(self, devices: int, rows: int, sizes: Sizes) -> Cut:
        """How mode `"model"` divides the model."""
        return find_cut(self.model, devices, rows, sizes, self.placement)

    @property
    def _timed(self) -> int:
        """The most devices that were timed."""
        return max((count for _, count in self.measured.times), default=1) if self.measured else 1

    def workload(self, **changes: Any) -> Workload:
        """The training of the whole batch, with some changes."""
        assert self.step is not None
        sizes, by_compiler = self.sizes, engines.current().partitions
        work = Workload(self.step, self.batch_size, sizes, by_compiler, self.cuts, self.per_host)
        return dataclasses.replace(work, **changes)

    def predict(
        self, mode: str, devices: int, *, traffic: Traffic | None = None, **changes: Any
    ) -> Prediction:
        """A step of the workload with some changes; `traffic` was counted."""
        load = find_load(mode, self.workload(**changes), devices)
        if traffic is not None:
            load = dataclasses.replace(load, traffic=traffic)
        link, host_link = self.link, self.host_link
        found = predict(mode, devices, load, link, self.processors, self.overlap, host_link)
        return found.widened(self.measured.times["data", 1].rounds) if self.measured else found

    def count_sizes(self, model: keras.Model, rows: int, fewer: int) -> Sizes:
        """The sizes of a copy of the model, from its memory on some rows and on fewer.

        In between, the memory is taken to grow evenly. It does not: with few rows the update needs
        most, with many the activations do. So it is rather less.
        """
        many, few = (self._count(model, one) for one in (rows, fewer))
        grown = _in_step(many) - _in_step(few)
        row = max(grown / (rows - fewer), 0.0) if rows > fewer else 0.0
        return dataclasses.replace(
            self.sizes,
            slots=many.bytes(kind="slots"),
            activations=round(row),
            working=max(round(_in_step(many) - rows * row), 0),
            passing=min(round(row), many.bytes(kind="temporaries") // rows),
            unknown=sum(one.unknown for one in many.held),
        )

    def _count(
        self, model: keras.Model, rows: int, devices: int = 1, parts: int = 1, **options: Any
    ) -> MemoryReport:
        """The memory of a model that was made parallel, on one of some parts of a batch."""
        with engines.current().places_kept(model):
            parallel = make_parallel(model, devices, **options)
            batch = compile_for(parallel, (self.inputs, self.targets))
            if parts > 1:
                accumulate(parallel, parts)
            return memory(parallel, take_rows(batch, rows))

    def count_memory(
        self, model: keras.Model, rows: int, devices: int, parts: int, **options: Any
    ) -> int:
        """The bytes of the fullest of these devices, which are here, with `options` of the mode."""
        return self._count(model, rows, devices, parts, **options).peak

    @property
    def doubts(self) -> list[str]:
        """What a reader of the predictions must beware of."""
        here = choose_devices(None, None)[0]
        if self.measured and self.given_link and self.speed == 1 and here.startswith("cpu:"):
            return [
                f"The step was timed on {here!r}, and the link is one of other devices: on faster "
                "devices a step is shorter, and copies are a larger part of it. Give `speed`, "
                "how many times as fast they are, or `step_seconds`."
            ]
        return []

    def describe(self) -> dict[str, Any]:
        """The settings that a reader of the predictions must know."""
        step, source = self.workload().step, "measured here" if self.measured else "given"
        source += f" (with the speed {self.speed:g})" if self.measured and self.speed != 1 else ""
        number = f"{self.processors or 0:.3g}"
        found = {
            "model": self.model.name,
            "weights": f"{show_bytes(self.sizes.weights)} in {self.sizes.tensors} variables",
            "batch size": self.batch_size,
            f"step on one device, {source}": f"{show_seconds(step.fixed_s)} + "
            f"{self.batch_size} rows x {1e6 * step.row_s:.4g} us",
            "link": str(self.link),
            "speed": self.speed != 1 and f"{self.speed:g} times that of the device here",
            "processors": self.processors is not None
            and f"they keep {number} device{'' if number == '1' else 's'} busy",
            "overlap": self.overlap and f"{self.overlap:.0%} of the copies hidden",
            "hosts": self.host_link and f"{self.per_host} devices each, linked by {self.host_link}",
            **describe_environment(choose_devices(None, None)[: self._timed]),
        }
        return {name: value for name, value in found.items() if value}


def _in_step(report: MemoryReport) -> int:
    """What a step needs beside the model's state."""
    return report.peak - report.bytes(kind="weights") - report.bytes(kind="slots")


def _check_modes(modes: Sequence[str], counts: Sequence[int], batch_size: int) -> None:
    """One known mode or more; in mode `"data"` every device needs a row."""
    if isinstance(modes, str) or not modes:
        raise ValueError(
            f"`modes` must be a sequence of one mode or more. Received: modes={modes!r}. Give "
            f"`modes=({modes or 'data'!r},)`."
        )
    for mode in modes:
        check_mode(mode)
    if "data" in modes and max(counts) > batch_size:
        raise ValueError(
            f"In mode 'data' `n_gpus` must not exceed the batch_size={batch_size} rows of a batch: "
            f"further devices would get no rows. Received: n_gpus={tuple(counts)!r}. Give fewer "
            "devices, or a larger batch."
        )


def _checked_cuts(cuts: Any) -> dict[int, Cut]:
    """A copy of them, for a user's may get more."""
    if not isinstance(cuts, Mapping) or not all(isinstance(one, Cut) for one in cuts.values()):
        raise ValueError(
            "`cuts` must be a dict from numbers of devices to `Cut`. Received: "
            f"cuts={cuts!r}. Give `{{2: Cut(size, copies, share)}}`."
        )
    return dict(cuts)


def _check_placement(placement: Any, modes: Sequence[str]) -> None:
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


def _known_step(given: Any, batch_size: int) -> StepTime | None:
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
