"""The memory that each device needs in a step, as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_choice, check_flag, check_model
from keras_multigpu.engines import Holding
from keras_multigpu.reports.forms import describe_environment, draw_bars, show_bytes, tell_unknown
from keras_multigpu.reports.inputs import check_batch, check_graph
from keras_multigpu.reports.models import step_prepared
from keras_multigpu.reports.report import Column, Report

KINDS = ("weights", "slots", "batch", "copies", "gradients", "activations", "temporaries", "other")
_BY_XLA = (
    "XLA counts all that a device holds; how it divides the memory of the step between "
    "gradients, activations and temporaries is estimated from the order of the operations."
)
_BY_GRAPH = (
    "Weights, slots and the batch are counted. Gradients, activations and temporaries are "
    "estimated, at the moment when the device holds most, from the sizes in TensorFlow's graphs "
    "and the order in which operations become ready. Memory within a kernel is not included."
)
_WITHOUT_XLA = "The step is compiled with XLA, which fuses operations and needs less than this."


def memory(model: keras.Model, batch: Any, training: bool = True) -> MemoryReport:
    """Counts the memory that each device needs in a training step, or in a prediction.

    Weights and the optimizer's slots are counted where they are. The rest is read from the program
    that XLA compiles on JAX, or from the graphs that TensorFlow makes for each device, so it needs
    no GPU: virtual devices (`keras_multigpu.use_virtual_devices`) give the same counts. The step is
    compiled for this batch, and on TensorFlow it runs once; the model's state is restored. Memory
    that the backend or a GPU library takes for itself is not included.

    Args:
        model: a Keras model, or a model from `make_parallel`; compiled, for `training`.
        batch: the inputs, or a tuple of inputs, targets and, optionally, sample weights, as
            arrays. Their values don't matter, only their shapes.
        training: a training step, or a prediction.

    Returns:
        A report with a row for each device: the bytes of each kind when it holds most.

    Raises:
        ValueError: if the model is not compiled, or its loss needs targets, and there are none, for
            a training step.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
        >>> model.compile("adam", "mse")
        >>> report = memory(model, (np.ones((6, 8)), np.ones((6, 4))))
        >>> report.bytes(kind="weights") == 8 * 4 * 4
        True
    """
    check_model(model)
    check_flag("training", training)
    if training and not model.compiled:
        raise ValueError(
            "`model` must be compiled for the memory of a training step: the optimizer has slots. "
            f"Received: model={model.name!r}, which is not compiled. Call `model.compile(...)`, or "
            "give `training=False`."
        )
    check_graph(model)
    given = check_batch(batch, model, training=training)
    with step_prepared(model, given, training):
        held = engines.current().find_memory(model, given, training)
    by_compiler = engines.current().partitions
    notes = [_BY_XLA if by_compiler else _BY_GRAPH]
    notes += [_WITHOUT_XLA] if model.jit_compile and not by_compiler else []
    settings = {
        "model": model.name,
        "step": "training" if training else "prediction",
        "batch size": len(keras.tree.flatten(given[0])[0]),
        **describe_environment(
            getattr(model, "devices", None) or sorted({one.device for one in held})
        ),
    }
    return MemoryReport(held, settings=settings, notes=notes)


class MemoryReport(Report):
    """What each device holds when a step needs most memory.

    Attributes:
        held: what the devices hold, by kind.
        devices: the devices' names.

    Example:
        >>> held = [
        ...     Holding("gpu:0", "weights", 400_000_000, is_counted=True),
        ...     Holding("gpu:0", "activations", 600_000_000, is_counted=False),
        ... ]
        >>> report = MemoryReport(held)
        >>> report.peak, report.notes
        (1000000000, ['gpu:0 holds most: 1.00 GB, of which 600 MB are activations.'])
    """

    def __init__(self, held: Sequence[Holding], *, notes: Sequence[str] = (), **options: Any):
        self.held = list(held)
        self.devices = tuple(dict.fromkeys(one.device for one in self.held))
        kinds = self._kinds = [kind for kind in KINDS if self.bytes(kind=kind)]
        columns = [Column("device"), *(Column(one, "B", show_bytes) for one in (*kinds, "sum"))]
        sizes = {name: [self.bytes(name, kind) for kind in (*kinds, None)] for name in self.devices}
        rows = [(name, *found) for name, found in sizes.items()]
        notes = [*self._conclude(), *notes]
        super().__init__("Memory of each device", columns, rows, notes, **options)

    def bytes(self, device: str | None = None, kind: str | None = None) -> int:
        """The bytes of a device and a kind, `None` for all of them.

        Raises:
            ValueError: if there is no such device or kind.
        """
        check_choice("device", device, None, *self.devices)
        check_choice("kind", kind, None, *KINDS)
        ours = [one for one in self.held if device in (None, one.device)]
        return sum(one.bytes for one in ours if kind in (None, one.kind))

    @property
    def peak(self) -> int:
        """The bytes of the device that holds most."""
        return max(map(self.bytes, self.devices), default=0)

    def draw(self, figure: Any) -> None:
        """Draws a bar for each device, made of what it holds."""
        axes = figure.subplots()
        parts = {
            kind: [self.bytes(one, kind) / 1e6 for one in self.devices] for kind in self._kinds
        }
        texts = [show_bytes(self.bytes(name)) for name in self.devices]
        colors = {kind: f"C{number}" for number, kind in enumerate(KINDS)}  # in all reports
        draw_bars(axes, self.devices, parts, xlabel="MB", colors=colors, texts=texts)
        axes.set(title=self.title)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)

    def _conclude(self) -> list[str]:
        if not self.devices:
            return []
        name = max(self.devices, key=self.bytes)
        kind = max(self._kinds, key=lambda one: self.bytes(name, one))
        size, total = self.bytes(name, kind), show_bytes(self.bytes(name))
        parts = [[self.bytes(one), self.bytes(one, kind)] for one in self.devices]
        are_equal = len(parts) > 1 and len({tuple(map(show_bytes, one)) for one in parts}) == 1
        who = "Each device holds" if are_equal else f"{name} holds most:"
        notes = [f"{who} {total}, of which {show_bytes(size)} are {kind}."]
        unknown = sum(one.unknown for one in self.held)
        return notes + tell_unknown(
            unknown, "they are left out, and the step needs more than this."
        )
