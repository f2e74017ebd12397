"""What is trained, and on what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from keras_multigpu.reports.prediction import Cut, Sizes, StepTime


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

    def memory(self, sizes: Sizes, rows: int) -> int | None:
        """The bytes of the fullest device in a step, which gathers the other weights."""
        kept = sizes.memory(rows, self.weights, self.slots)
        if kept is None or self.weights == 1:
            return kept
        elsewhere = round((1 - self.weights) * self.table_gradients)
        return kept + sizes.weights - self.tables - elsewhere


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and on what.

    `by_compiler` is `Engine.partitions`: then weights stay on the devices, gradients are summed in
    a ring, and a batch that the devices don't divide is computed whole on each. `processors` is the
    number of devices that the processors could keep busy, for virtual devices, which share them;
    `None` if each device has its own. `cuts` are by number of devices; `shard` is for mode
    `"data"`. `per_host` is the number of devices in a host; `None` if one host has them all. Each
    host has a process that computes its rows, or with `by_driver` one process drives all.
    """

    step: StepTime
    batch_size: int
    sizes: Sizes
    by_compiler: bool = False
    processors: float | None = None
    cuts: Mapping[int, Cut] = dataclasses.field(default_factory=dict)
    per_host: int | None = None
    by_driver: bool = False
    shard: Shard | None = None

    def hosts(self, devices: int) -> int:
        """The number of hosts that have so many devices."""
        return 1 if self.per_host is None else math.ceil(devices / self.per_host)

    def in_host(self, devices: int) -> int:
        """The number of devices in the fullest host, of so many."""
        return devices if self.per_host is None else min(devices, self.per_host)
