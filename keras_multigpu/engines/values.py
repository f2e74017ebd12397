"""What engines are given and give: tensors, calls, replicas and their results, transfers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

Tensor = Any
"""A tensor of the backend: dense, sparse or ragged."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of one call of a model."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one replica made of its inputs.

    Attributes:
        outputs: the template's outputs, in its structure, with their masks.
        losses: the tensors given to `add_loss` in the call, in order; for replicas with weights
            of their own also the penalties of the weights' regularizers.
        updates: pairs of a variable that the call assigned and its value in this replica.
        shapes: the outputs' shapes for any number of rows, `None` for an axis that is not fixed.
    """

    outputs: Any
    losses: list[Tensor]
    updates: list[tuple[keras.Variable, Tensor]]
    shapes: list[tuple[int | None, ...]]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that crosses from one device to another in a step.

    Attributes:
        source: the device it comes from.
        target: the device it goes to.
        kind: `"inputs"`, `"weights"`, `"activations"`, `"gradients"`, or `"other"`: state that
            layers keep, such as moving averages, and single numbers.
        tensor: its name in the backend's program.
        bytes: its size; `None` where that is known only when the step runs.
        copies: how many copies it is made in.
    """

    source: str
    target: str
    kind: str
    tensor: str
    bytes: int | None
    copies: int = 1


class Replicas(abc.ABC):
    """The replicas of one template, with its weights or with weights of their own."""

    @abc.abstractmethod
    def run(self, calls: Sequence[Call], sizes: Sequence[Any], *, compiled: bool) -> list[Result]:
        """Calls every replica on its own inputs, without side effects.

        Gradients flow back to the trainable variables, summed over the replicas that share one,
        and to the inputs. Every replica draws its own random numbers; the first one draws
        those of the template itself. The results are gathered on the first device.

        Args:
            calls: the arguments of each replica.
            sizes: the rows of the batch that are each replica's own; 0 for one beyond the last.
            compiled: compile each replica with XLA.
        """

    @abc.abstractmethod
    def find_sums(self, call: Call, count: int) -> list[bool]:
        """Whether each of the losses that a call adds is a sum over the rows, or a mean.

        Args:
            call: the arguments of one replica.
            count: how many losses there are.
        """

    @abc.abstractmethod
    def retrace(self) -> None:
        """Drops what was traced: the template's layers may have changed."""
