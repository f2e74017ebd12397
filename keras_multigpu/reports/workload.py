"""What is trained, and on what: times and bytes of a model, and how it is divided."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from keras_multigpu.arguments import finite_number, non_negative_integer


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step on one device: `fixed_s + rows * row_s` seconds."""

    fixed_s: float
    row_s: float

    def seconds(self, rows: float) -> float:
        """The time of a step on so many rows."""
        return self.fixed_s + rows * self.row_s

    def sped_up(self, factor: float) -> StepTime:
        """The same on a device that is so many times as fast."""
        return StepTime(self.fixed_s / factor, self.row_s / factor)

    @classmethod
    def through(cls, rows: int, seconds: float, fewer: int, shorter: float) -> StepTime:
        """The line through the times of a batch and of a smaller one.

        Neither part goes below zero: if the smaller batch took longer, that was noise.
        """
        slope = (seconds - shorter) / (rows - fewer)
        row_s = min(max(slope, 0.0), seconds / rows)
        return cls(seconds - rows * row_s, row_s)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes of a model, and the number of its variables (`tensors`).

    `weights` counts all variables, `gradients` the trainable ones. `outputs` and `inputs` are per
    row. `tables` are the bytes of large tables that stay on one device without a compiler;
    `looked_up` those of the rows of them that an example names.

    The others are counted for `plan` only. `slots` is the optimizer's state, `activations` all that
    a step keeps per row, `working` what it needs besides, however many rows there are: `None` if
    not counted. `passing` is the part of `activations` that is not kept: a device needs it even for
    a part of the layers. `unknown` tensors of unknown size are left out.
    """

    weights: int
    gradients: int
    tensors: int
    outputs: int = 0
    inputs: int = 0
    tables: int = 0
    looked_up: int = 0
    slots: int = 0
    activations: int = 0
    working: int | None = None
    passing: int = 0
    unknown: int = 0


@dataclasses.dataclass(frozen=True)
class Cut:
    """How mode `"model"` divides a model.

    Args:
        size: the bytes of the activations that cross in a forward pass on the whole batch; their
            gradients cross back.
        copies: the number of these tensors.
        share: the busiest device's share of the work: 1 for a chain, whose parts run one after
            the other, and 1 / n for n equal branches.
        memory: the bytes that the busiest device keeps, if known.

    Example:
        >>> Cut(size=25_600, copies=1, share=0.5).share  # two equal branches that meet at the end
        0.5
    """

    size: int
    copies: int
    share: float = 1.0
    memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "copies"):
            non_negative_integer(name, getattr(self, name))
        if self.memory is not None:
            non_negative_integer("memory", self.memory)
        finite_number("share", self.share, "a share above 0, up to 1", lambda one: 0 < one <= 1)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A value of `shard`, and the shares that the fullest device keeps between steps.

    `tables` are the bytes of weights that no step gathers, because their rows are added up where
    they are, `table_gradients` those of their gradients that are dense. For each row of a batch
    `sums` bytes of such sums cross.
    """

    name: str
    weights: float
    slots: float
    tables: int = 0
    table_gradients: int = 0
    sums: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and on what.

    `by_compiler` is `Engine.partitions`: then weights stay on the devices, gradients are summed in
    a ring, and a batch that the devices don't divide is computed whole on each. `cuts` are by
    number of devices; `shard` is for mode `"data"`. `per_host` is the number of devices in a host;
    `None` if one host has them all. Each host has a process that computes its rows.
    """

    step: StepTime
    batch_size: int
    sizes: Sizes
    by_compiler: bool = False
    cuts: Mapping[int, Cut] = dataclasses.field(default_factory=dict)
    per_host: int | None = None
    shard: Shard | None = None

    def hosts(self, devices: int) -> int:
        """The number of hosts that have so many devices."""
        return 1 if self.per_host is None else math.ceil(devices / self.per_host)

    def in_host(self, devices: int) -> int:
        """The number of devices in the fullest host, of so many."""
        return devices if self.per_host is None else min(devices, self.per_host)
