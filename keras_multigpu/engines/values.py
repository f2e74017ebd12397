"""What engines are given and give: tensors, calls, replicas and their results, transfers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
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
    """

    outputs: Any
    losses: list[Tensor]
    updates: list[tuple[keras.Variable, Tensor]]


@dataclasses.dataclass
class Plan:
    """How a call of a template is computed in slices of its batch.

    Attributes:
        obstacle: why the batch can't be sliced; `None` where it can.
        doubt: why it could not be found out whether it can; `None` where it could.
        losses: the rule by which each loss of the replicas makes that of the batch.
        updates: the same for the states that are assigned, by the `id` of the variable.
        trace: what the engine has traced for the call.
    """

    obstacle: str | None = None
    doubt: str | None = None
    losses: Sequence[str] = ()
    updates: Mapping[int, str] = dataclasses.field(default_factory=dict)
    trace: Any = None


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
    def plan(self, call: Call, *, compiled: bool) -> Plan:
        """Finds out whether the batch of a call can be sliced, and how results are merged.

        Args:
            call: the arguments of the call, for the whole batch.
            compiled: compile each replica with XLA.
        """

    @abc.abstractmethod
    def run(
        self,
        calls: Sequence[Call],
        sizes: Sequence[Any],
        *,
        compiled: bool,
        plan: Plan | None = None,
    ) -> list[Result]:
        """Calls every replica on its own inputs, without side effects.

        Gradients flow back to the variables that are watched, summed over the replicas that
        share one, and to the inputs. Every replica draws its own random numbers; the first one
        draws those of the template itself. The results are gathered on the first device.

        Args:
            calls: the arguments of each replica.
            sizes: the rows of the batch that are each replica's own; 0 for one beyond the last.
            compiled: compile each replica with XLA.
            plan: what `plan` gave for slices of one batch; `None` where each replica has a
                whole one.
        """

    @abc.abstractmethod
    def finish(self, outputs: Any, plan: Plan) -> Any:
        """The outputs of the whole batch, of merged ones.

        Losses of classes look for the operation that ended an output, which merging hides.

        Args:
            outputs: in the structure of each replica's `Result.outputs`.
            plan: of their call.
        """

    @abc.abstractmethod
    def retrace(self) -> None:
        """Drops what was found out: the template's layers may have changed."""
