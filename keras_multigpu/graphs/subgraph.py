"""Models made from parts of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.graphs.graph import LayerCall


def part_of_graph(inputs: Any, outputs: Any, name: str, policy: Any) -> keras.Model:
    """Makes a model of the layers between tensors of a graph."""
    model = keras.Model(inputs, outputs, name=name, dtype=policy)
    # The layers pass masks on; by default Keras would warn that the model doesn't.
    model.supports_masking = True
    model.compute_mask = lambda inputs, previous_mask: None
    return model


class SubGraph(keras.Model):
    """A model that makes some calls of a graph, in the given order.

    A functional model of the same tensors may call the layers in another order than the whole
    model does, and refuses tensors with a shared layer between them. Inputs and outputs are lists
    of the graph's tensors.
    """

    def __init__(
        self,
        calls: Sequence[LayerCall],
        inputs: Sequence[keras.KerasTensor],
        outputs: Sequence[keras.KerasTensor],
        name: str,
        policy: Any,
    ):
        super().__init__(name=name, dtype=policy, autocast=False)
        # The layers pass masks on; by default Keras would warn that the model doesn't.
        self.supports_masking = True
        self.parts = [call.layer for call in calls]
        self._calls = tuple(calls)
        self._ends = (tuple(map(id, inputs)), tuple(map(id, outputs)))
        self.built = True

    def call(self, inputs: list[Any], training: bool | None = None) -> list[Any]:
        """Makes the calls, each on the results of earlier ones."""
        taken, given = self._ends
        tensors = dict(zip(taken, inputs))
        for call in self._calls:
            args, kwargs = keras.tree.map_structure(
                lambda part: tensors[id(part)] if isinstance(part, keras.KerasTensor) else part,
                call.arguments,
            )
            # Functional models check this too; Keras has no public way.
            if training is not None and "training" in getattr(call.layer, "_call_context_args", ()):
                kwargs["training"] = training
            made = keras.tree.flatten(call.layer(*args, **kwargs))
            tensors.update(zip(map(id, keras.tree.flatten(call.result)), made))
        return [tensors[key] for key in given]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """Returns no mask: the layers have already set the outputs' masks."""
