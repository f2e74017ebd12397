"""What a replica returns, on its own device."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_multigpu.engines.tensorflow.tensors import floats
from keras_multigpu.engines.values import Tensor


@dataclasses.dataclass
class Raw:
    """What a replica returns, on its own device.

    Attributes:
        outputs: the template's outputs.
        masks: the mask of each output, `None` where it has none.
        losses: the tensors given to `add_loss`.
        updates: the new values of the variables assigned, by their keys.
        shapes: the outputs' shapes for any number of rows.
        trace: the traced function and the tensors it was called with; `None` eagerly.
    """

    outputs: Any
    masks: list[Tensor | None]
    losses: list[Tensor]
    updates: dict[str, Tensor]
    shapes: list[tuple[int | None, ...]]
    trace: tuple[Any, list[Tensor]] | None = None

    @property
    def differentiable(self) -> Any:
        """What gradients can come back to."""
        return self.outputs, self.losses

    def connected(self, sources: list[Tensor], is_used: list[bool]) -> list[bool]:
        """Whether each source has a part in the results that are used.

        A traced function has a gradient for all of its arguments; this tells those that would
        have none if the template were called by itself.
        """
        if self.trace is None or all(is_used):
            return [True] * len(sources)
        function, arguments = self.trace
        traced = function.structured_outputs
        results = floats((traced["outputs"], traced["losses"]))
        reached = _reached_from([one for one, use in zip(results, is_used) if use])
        # Not a comparison of tensors, which would be one of their values.
        places = {id(argument): place for place, argument in enumerate(arguments)}
        return [function.inputs[places[id(source)]].op in reached for source in sources]


def _reached_from(tensors: list[Tensor]) -> set[Any]:
    """The operations of a graph that some of its tensors depend on."""
    reached: set[Any] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in reached:
            reached.add(operation)
            waiting.extend(tensor.op for tensor in operation.inputs)
    return reached
