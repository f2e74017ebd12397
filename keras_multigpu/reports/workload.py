"""What is trained, and on what: times and bytes of a model, and how it is divided."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import finite_number, non_negative_integer, number_of, quantity
from keras_multigpu.graphs import costs
from keras_multigpu.graphs.costs import row_bytes, variables_bytes
from keras_multigpu.graphs.graph import Graph, is_graph, read_graph
from keras_multigpu.graphs.placement import check_placement, choose_placement, place_by_names

_NOISE = 1.1  # by as much may two measurements of one time differ


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
        """The line through the times of a batch and of a smaller one."""
        # Neither part goes below zero: if the smaller batch took longer, that was noise.
        slope = (seconds - shorter) / (rows - fewer)
        row_s = min(max(slope, 0.0), seconds / rows)
        return cls(seconds - rows * row_s, row_s)

    @classmethod
    def known(cls, given: Any, batch_size: int) -> StepTime | None:
        """The step time that the user gave, if any."""
        if given is None:
            return None
        if not isinstance(given, Mapping):
            return cls(0.0, quantity("step_seconds", given) / batch_size)
        others = [rows for rows in given if rows != batch_size]
        if batch_size not in given or len(others) != 1 or not 0 < others[0] < batch_size:
            raise ValueError(
                "`step_seconds` must have the time of a step on "
                f"batch_size={number_of(batch_size, 'row')} and on one smaller batch. Received: "
                f"step_seconds={given!r}. Give "
                f"{{{batch_size}: ..., {max(batch_size // 2, 1)}: ...}}, or one time."
            )
        seconds = {rows: quantity("step_seconds", one) for rows, one in given.items()}
        if seconds[others[0]] > _NOISE * seconds[batch_size]:
            raise ValueError(
                "`step_seconds` must not be longer for fewer rows. Received: "
                f"step_seconds={given!r}. Give {{rows: seconds}}."
            )
        return cls.through(batch_size, seconds[batch_size], others[0], seconds[others[0]])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes of a model; those from `slots` on are counted for `plan` only."""

    weights: int  # all variables
    gradients: int  # the trainable ones
    tensors: int  # the number of variables
    outputs: int = 0  # of a row
    inputs: int = 0  # of a row
    tables: int = 0  # large tables that stay on one device without a compiler
    looked_up: int = 0  # the rows of them that an example names
    looped: int = 0  # the weights that recurrent layers train
    slots: int = 0  # the optimizer's state
    activations: int = 0  # all that a step needs for a row
    working: int | None = None  # what it needs besides, however many rows; `None`: not counted
    passing: int = 0  # of `activations`, not kept: needed even for a part of the layers
    unknown: int = 0  # the number of tensors of unknown size, which are left out


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


def check_cuts(cuts: Any) -> dict[int, Cut]:
    """A copy of them, for a user's may get more."""
    cuts = {} if cuts is None else cuts
    if not isinstance(cuts, Mapping) or not all(isinstance(one, Cut) for one in cuts.values()):
        raise ValueError(
            "`cuts` must be a dict from numbers of devices to `Cut`. Received: "
            f"cuts={cuts!r}. Give `{{2: Cut(size, copies, share)}}`."
        )
    return dict(cuts)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A value of `shard`, and the shares that the fullest device keeps between steps."""

    name: str
    weights: float
    slots: float
    tables: int = 0  # bytes of weights that no step gathers: rows are added up where they are
    table_gradients: int = 0  # bytes of their gradients that are dense
    sums: int = 0  # bytes of such sums that cross, for each row of a batch


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and on what.

    With `by_compiler` (`Engine.partitions`) weights stay on the devices, gradients are summed in a
    ring, and a batch that the devices don't divide is computed whole on each.
    """

    step: StepTime
    batch_size: int
    sizes: Sizes
    by_compiler: bool = False
    cuts: Mapping[int, Cut] = dataclasses.field(default_factory=dict)  # by number of devices
    per_host: int | None = None  # devices; each host has a process that computes its rows
    shard: Shard | None = None  # of mode "data"

    def hosts(self, devices: int) -> int:
        """The number of hosts that have so many devices."""
        return 1 if self.per_host is None else math.ceil(devices / self.per_host)

    def in_host(self, devices: int) -> int:
        """The number of devices in the fullest host, of so many."""
        return min(devices, self.per_host or devices)


def find_sizes(
    model: keras.Model, outputs: Any, inputs: Any = (), batch_size: int = engines.LARGE_BATCH
) -> Sizes:
    """The bytes of a built model, given its outputs and inputs for one row; no memory of a step."""
    graph = read_graph(model) if is_graph(model) else Graph((), (), ())
    tables, looked_up = _find_tables(graph, batch_size)
    layers = (one for one in engines.all_layers(model) if isinstance(one, keras.layers.RNN))
    recurrent = (variable for layer in layers for variable in layer.trainable_variables)
    return Sizes(
        weights=variables_bytes(model.variables),
        gradients=variables_bytes(model.trainable_variables),
        tensors=len(model.variables),
        outputs=sum(map(row_bytes, keras.tree.flatten(outputs))),
        inputs=sum(map(row_bytes, keras.tree.flatten(inputs))),
        tables=tables,
        looked_up=looked_up,
        looped=variables_bytes(recurrent),
    )


def _find_tables(graph: Graph, batch_size: int) -> tuple[int, int]:
    """The bytes of trained tables of which a batch names few rows, and of a row's."""
    named: collections.Counter[Any] = collections.Counter()
    for call in graph.calls:
        if isinstance(call.layer, keras.layers.Embedding) and call.layer.trainable:
            named[call.layer] += sum(map(row_bytes, call.outputs))
    sizes = {one: variables_bytes(one.trainable_variables) for one in named}
    large = [one for one, size in sizes.items() if size > batch_size * named[one]]
    return sum(sizes[one] for one in large), sum(named[one] for one in large)


def find_cut(
    model: keras.Model,
    devices: int,
    batch_size: int,
    sizes: Sizes,
    placement: Mapping[str, int] | None = None,
) -> Cut:
    """What would cross if a model were divided, and the busiest device's work and memory."""
    if not is_graph(model):
        raise ValueError(
            "What crosses in mode 'model' is read from the graph of a Sequential or functional "
            f"model without a custom `call`. Received: model={model!r}. Give `cuts`, or do without "
            "mode 'model'."
        )
    check_placement(placement, devices)
    graph = read_graph(model)
    numbers = place_by_names(graph, placement) if placement else choose_placement(graph, devices)
    used = len(set(numbers))
    if used < devices and not placement:
        raise ValueError(
            f"In mode 'model' {devices - used} of {devices} devices would get no layer. Received: "
            f"{model.name!r}, whose layers make {number_of(used, 'stage')}. Take "
            f"{number_of(used, 'device')}."
        )
    crossings = costs.find_crossings(*costs.with_loss(graph, numbers))
    between = [one for one in crossings if one.maker is not None]
    return Cut(
        size=batch_size * sum(one.row_bytes for one in between),
        copies=len(between),
        share=costs.find_share(graph, numbers),
        memory=_find_fullest(graph, numbers, batch_size, sizes),
    )


def _find_fullest(
    graph: Graph, numbers: Sequence[int], batch_size: int, sizes: Sizes
) -> int | None:
    """The bytes of the device that keeps most: its layers' variables and outputs; if counted.

    Each weight has a gradient and optimizer slots beside it.
    """
    if sizes.working is None:
        return None
    outputs = sum(row_bytes(one) for call in graph.calls for one in call.outputs)
    kept_rows = sizes.activations - sizes.passing
    factor = 1 + (sizes.working + sizes.slots) / max(sizes.weights, 1)
    kept: dict[int, int] = collections.defaultdict(int)
    counted: set[int] = set()
    for call, number in zip(graph.calls, numbers):
        fresh = [variable for variable in call.variables if id(variable) not in counted]
        counted |= set(map(id, fresh))
        made = batch_size * sum(map(row_bytes, call.outputs))
        kept[number] += round(factor * variables_bytes(fresh))
        kept[number] += round(kept_rows / max(outputs, 1) * made)
    return max(kept.values(), default=0) + batch_size * sizes.passing
