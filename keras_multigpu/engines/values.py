"""The values that modes and engines exchange: requests, calls, plans, results, counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

Tensor = Any
"""A tensor of the backend: dense, sparse or ragged."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of one call of a model."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user or a file asks for.

    Attributes:
        mode: the mode's name.
        template: the model to make parallel.
        devices: the canonical names of the devices.
        options: the mode's options.
    """

    mode: str
    template: keras.Model
    devices: tuple[str, ...]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one call of a template.

    Attributes:
        outputs: the template's outputs, in its structure, with their masks.
        losses: the tensors given to `add_loss`, in order; for models with separate weights also
            the penalties of the weights' regularizers.
        updates: pairs of a variable that the call assigned and its new value.
        is_random: whether the outputs may depend on random numbers. A call may draw some and not
            use them.
    """

    outputs: Any
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    updates: list[tuple[keras.Variable, Tensor]] = dataclasses.field(default_factory=list)
    is_random: bool = True


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that crosses from one device to another in a step.

    Attributes:
        source: the device it comes from.
        target: the device it goes to.
        kind: `"inputs"`, `"weights"`, `"activations"`, `"gradients"`, or `"other"`: state that
            layers keep, such as moving averages, and single numbers.
        tensor: its name in the backend's program.
        bytes: its size; `None` if known only when the step runs.
        copies: how many copies are made.
    """

    source: str
    target: str
    kind: str
    tensor: str
    bytes: int | None
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a device holds of one kind when a step needs most memory.

    Attributes:
        device: the device.
        kind: `"weights"` (with all other state of the layers), `"slots"` (the optimizer's state),
            `"batch"`, `"copies"` (of weights that are at home on another device), `"gradients"` (of
            weights), `"activations"` (kept for the backward pass), `"temporaries"`, or `"other"`:
            the metrics' state and the results of the step.
        bytes: the size.
        is_counted: whether this size is certain, and not estimated.
        unknown: how many tensors it leaves out, because their size is known only when a step runs.
    """

    device: str
    kind: str
    bytes: int
    is_counted: bool
    unknown: int = 0
