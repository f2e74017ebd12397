"""What `advise` and `plan` share: a model, a batch and devices; how long a step takes there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import finite_number, number_of, positive_integer, quantity
from keras_multigpu.devices import choose_devices
from keras_multigpu.engines.wide import busiest_share
from keras_multigpu.modes import ParallelModel
from keras_multigpu.parallel import check_template, make_parallel
from keras_multigpu.reports import forms, inputs, loads, models, timing, workload
from keras_multigpu.reports.interconnect import Link, default_link, find_host_link, find_link
from keras_multigpu.reports.memory_report import MemoryReport, memory
from keras_multigpu.reports.prediction import Prediction, Traffic, predict
from keras_multigpu.reports.transfers_report import transfers
from keras_multigpu.reports.workload import Cut, Sizes, StepTime, Workload

_MOST_MADE = 4096  # rows of inputs; a larger batch repeats them
_FEW = 16  # rows, of the first step that is counted
_MOST_BYTES = 4e9  # of such a step on a processor: TensorFlow's kernels crash on larger tensors
_FIXED = (
    "The model takes batches of this size only, so that no smaller one was tried: all of a step is "
    "taken to shrink with the rows of a device. That flatters many devices."
)

_SHARED = (
    "The devices here are virtual: they share one processor, and the prediction takes each for a "
    "processor of its own. Give `processors`, or the `link` of the devices that you ask about."
)


@dataclasses.dataclass
class Subject:
    """A built model, a batch to train it on, and the devices in question: checked on creation.

    The arguments are those of `advise`; without `modes` the caller finds which can be.
    """

    model: keras.Model
    batch_size: int
    n_gpus: Sequence[int]
    modes: Sequence[str]
    _: dataclasses.KW_ONLY
    link: Any
    step_seconds: float | Mapping[int, float] | None
    speed: float
    inputs: Any
    targets: Any
    cuts: Any
    overlap: float
    steps: int
    placement: Mapping[str, int] | None = None
    devices_per_host: int | None = None
    host_link: Any = None
    processors: float | None = None
    measured: timing.Measured | None = None

    def __post_init__(self) -> None:
        self.link = find_link(self.link)
        self.host_link = find_host_link(self.devices_per_host, self.host_link, self.n_gpus)
        self.batch_size = positive_integer("batch_size", self.batch_size)
        positive_integer("steps", self.steps)
        quantity("speed", self.speed)
        share, hint = "a share, from 0 to 1", "Give 0 if copies and computations take turns."
        finite_number("overlap", self.overlap, share, lambda one: 0 <= one <= 1, hint)
        if self.processors is not None:
            quantity("processors", self.processors)
        known = StepTime.known(self.step_seconds, self.batch_size)
        self.step = known and known.sped_up(self.speed)
        check_template(self.model)
        models.check_built(self.model)
        inputs.check_graph(self.model)
        self.cuts = workload.check_cuts(self.cuts)
        if self.inputs is None:
            self.inputs = inputs.make_inputs(self.model, min(self.batch_size, _MOST_MADE))
        else:
            inputs.check_given("inputs", self.inputs, self.model, self.batch_size)
        if self.targets is not None:
            inputs.check_given("targets", self.targets, self.model, self.batch_size)
        asked = (self.model, self.inputs, self.batch_size)
        outputs, self.takes_fewer = models.call_on_one_row(*asked)
        self.sizes = workload.find_sizes(self.model, outputs, self.inputs, self.batch_size)
        self.held: dict[Any, MemoryReport] = {}  # of copies that were counted
        self.progress: keras.utils.Progbar | None = None  # of these
        self._counted: dict[tuple[int, int], tuple[Cut, Traffic]] = {}  # by devices and rows
        self.left_out: dict[tuple[str, int], ValueError] = {}  # modes and numbers of devices
        self._leave_out([(one, n) for one in self.modes for n in self.n_gpus if n > 1])

    def _leave_out(self, asked: Sequence[tuple[str, int]]) -> None:
        """Finds on how many devices a mode has no rows for each, or can't divide the model."""
        for mode, count in asked:
            try:
                if mode == "data":
                    loads.check_rows(count, self.batch_size)
                elif mode == "model":
                    self.find_cut(count, self.batch_size, self.sizes)
            except ValueError as reason:
                if mode == "model" and self.placement:
                    raise  # it is the user's
                self.left_out[mode, count] = reason
        if self.left_out and len(self.left_out) == len(asked):
            raise next(iter(self.left_out.values()))  # nothing else is asked

    @property
    def rows(self) -> int:
        """The rows of a device in mode "data"; those of the batch if the model takes no others."""
        return math.ceil(self.batch_size / (max(self.n_gpus) if self.takes_fewer else 1))

    @property
    def few_rows(self) -> int:
        """As many as a device's in the smallest part of a batch, or rather more."""
        return _FEW if self.rows >= 2 * _FEW else max(self.rows // _FEW, 1)

    @functools.cached_property
    def most_rows(self) -> int:
        """The rows, up to a batch's, of the largest step that a processor can be given to count."""
        if not (self.takes_fewer and choose_devices(None, None)[0].startswith("cpu:")):
            return self.batch_size
        rows, most = min(self.rows, _FEW), _MOST_BYTES
        while rows < self.batch_size:
            few = self.count(self.model, rows)
            most = max(most, 2 * in_step(few)) if rows <= _FEW else most
            # A step on n times as many rows needs n times as much at most, and the same state.
            room = min(forms.free_memory() / 2 - few.peak, most)
            times = int(room / max(in_step(few), 1)) + 1
            if times < 2:
                break
            rows = min(times * rows, self.rows if rows < self.rows else self.batch_size)
        return rows

    @property
    def is_here(self) -> bool:
        """Whether devices of this machine are meant, which can be timed."""
        return self.link is None and self.speed == 1 and self.host_link is None

    @property
    def _is_shared(self) -> bool:
        """Whether these are virtual devices, which share a processor."""
        return self.is_here and forms.are_virtual(choose_devices(None, None))

    @functools.cached_property
    def _used_link(self) -> Link:
        """The link that the user gave, or that of this machine; one device needs none."""
        return self.link or (default_link() if max(self.n_gpus) > 1 else Link("none", math.inf))

    def measure(self, rows: int, fewer: int, here: Mapping[str, Sequence[int]]) -> None:
        """Times steps on `rows` rows and on fewer, on devices that are `here`, if it has to."""
        if self.step is None:
            sizes = (rows, fewer if self.takes_fewer else rows)
            batch, asked = (self.inputs, self.targets), (sizes, self.steps, here)
            with inputs.targets_asked_for(self.model, self.targets):
                self.measured = timing.measure_steps(self.model, batch, *asked, self.placement)
            self.step = self.measured.step.sped_up(self.speed)
            if self.processors is None and self._is_shared:
                cores = forms.count_cores()
                self.processors = min(max(cores / self.measured.cores, 1.0), cores)

    def find_cut(self, devices: int, rows: int, sizes: Sizes) -> tuple[Cut, Traffic | None]:
        """How mode `"model"` divides the model, and the traffic if a compiler tells it."""
        if devices in self.cuts:
            return self.cuts[devices], None
        if not engines.current().partitions:
            return workload.find_cut(self.model, devices, rows, sizes, self.placement), None
        if (devices, rows) not in self._counted:
            self._counted[devices, rows] = self._count_cut(devices, rows)
        return self._counted[devices, rows]

    def _count_cut(self, devices: int, rows: int) -> tuple[Cut, Traffic]:
        """How a compiler divides the model: it is compiled for as many devices, which are here."""
        here = len(choose_devices(None, None))
        if devices > here:
            raise ValueError(
                f"On {engines.current().title} mode 'model' is compiled for as many devices, to "
                f"count what crosses, so that they have to be here, virtual ones too. Received: "
                f"{devices} devices, of which {here} {'is' if here == 1 else 'are'} here. Call "
                f"`keras_multigpu.use_virtual_devices({devices})` first, or give `cuts`."
            )
        if rows > self.most_rows:
            raise ValueError(
                f"What crosses in mode 'model' is counted on {number_of(self.most_rows, 'row')} at "
                f"most on a processor. Received: {number_of(rows, 'row')}. Give `cuts`."
            )
        with self._compiled(self.model, rows, devices, mode="model") as (parallel, batch):
            moved = (one for one in transfers(parallel, batch).training if one.kind != "inputs")
            sent = loads.find_busiest(moved, duplex=True)
            held = memory(parallel, batch).peak
        share = busiest_share(self.model, devices)
        return Cut(round(sent.sent / 2), round(sent.copies / 2), share, held), sent  # half forward

    def predict(
        self, mode: str, devices: int, *, traffic: Traffic | None = None, **changes: Any
    ) -> Prediction:
        """A step on the whole batch, with some changes of the workload; `traffic` was counted."""
        assert self.step is not None
        by_compiler, hosts = engines.current().partitions, self.devices_per_host
        work = Workload(self.step, self.batch_size, self.sizes, by_compiler, {}, hosts)
        work = dataclasses.replace(work, **changes)
        if mode == "model" and devices > 1:
            cut, counted = self.find_cut(devices, work.batch_size, work.sizes)
            work, traffic = dataclasses.replace(work, cuts={devices: cut}), traffic or counted
        load = loads.find_load(mode, work, devices)
        if traffic is not None:
            load = dataclasses.replace(load, traffic=traffic)
        used = (self._used_link, self.processors, self.overlap, self.host_link)
        found = predict(mode, devices, load, *used)
        return found.widened(self.measured.spread) if self.measured else found

    def count(
        self, model: keras.Model, rows: int, devices: int = 1, parts: int = 1, **options: Any
    ) -> MemoryReport:
        """The memory of a copy of the model, made parallel, on one of some parts of a batch."""
        asked = (model, rows, devices, parts, *options.items())
        if asked not in self.held:
            with self._compiled(model, rows, devices, parts, **options) as (parallel, batch):
                self.held[asked] = memory(parallel, batch)
            if self.progress is not None:
                self.progress.update(len(self.held))
        return self.held[asked]

    @contextlib.contextmanager
    def _compiled(
        self, model: keras.Model, rows: int, devices: int, parts: int = 1, **options: Any
    ) -> Iterator[tuple[ParallelModel, Any]]:
        """Scope in which a model is parallel and compiled, with some rows to train it on."""
        with engines.current().places_kept(model):
            parallel = make_parallel(model, devices, **options)
            given = inputs.take_rows((self.inputs, self.targets), rows)
            batch = timing.compile_for(parallel, given)
            timing.renew_optimizer(parallel, parts)
            with inputs.targets_asked_for(model, self.targets):
                yield parallel, batch

    @property
    def doubts(self) -> list[str]:
        """What a reader of the predictions must beware of."""
        notes = []
        for mode in self.modes:
            reasons = {n: why for (one, n), why in self.left_out.items() if one == mode}
            if reasons:
                why, counts = reasons[max(reasons)], forms.listed(reasons)
                notes.append(f"Mode {mode!r} on {counts} devices is left out: {why}")
        if not self.takes_fewer:
            notes.append(_FIXED)
        here = choose_devices(None, None)[0]
        if self._is_shared:
            notes.append(_SHARED if self.processors is None else forms.VIRTUAL)
        elif self.measured and self.link and self.speed == 1 and here.startswith("cpu:"):
            notes.append(
                f"The step was timed on {here!r}, and the link is one of other devices: on faster "
                "devices a step is shorter, and copies are a larger part of it. Give `speed`, "
                "how many times as fast they are, or `step_seconds`."
            )
        return notes

    def describe(self) -> dict[str, Any]:
        """The settings that a reader of the predictions must know."""
        assert self.step is not None
        source, timed = "given", 1  # the most devices that were timed
        if self.measured:
            source, timed = "measured here", max(count for _, count, _ in self.measured.times)
            source += f" (with the speed {self.speed:g})" if self.speed != 1 else ""
        number, hosts = (
            f"{self.processors or 0:.3g}",
            number_of(self.devices_per_host or 0, "device"),
        )
        found = {
            "model": self.model.name,
            "weights": f"{forms.show_bytes(self.sizes.weights)} in "
            f"{number_of(self.sizes.tensors, 'variable')}",
            "batch size": self.batch_size,
            f"step on one device, {source}": f"{forms.show_seconds(self.step.fixed_s)} + "
            f"{number_of(self.batch_size, 'row')} x {1e6 * self.step.row_s:.4g} us",
            "link": max(self.n_gpus) > 1 and str(self._used_link),
            "speed": self.speed != 1 and f"{self.speed:g} times that of the device here",
            "processors": self.processors is not None
            and f"they keep {number} device{'' if number == '1' else 's'} busy",
            "overlap": self.overlap and f"{self.overlap:.0%} of the copies hidden",
            "hosts": self.host_link and f"{hosts} each, linked by {self.host_link}",
            **forms.describe_environment(choose_devices(None, None)[:timed]),
        }
        return {name: value for name, value in found.items() if value}


def in_step(report: MemoryReport) -> int:
    """What a step needs beside the model's state."""
    return report.peak - report.bytes(kind="weights") - report.bytes(kind="slots")
