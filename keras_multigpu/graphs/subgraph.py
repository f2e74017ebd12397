"""Models made from parts of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.graphs.graph import Graph


def part_of_graph(inputs: Any, outputs: Any, name: str, policy: Any) -> keras.Model:
    """Makes a model of the layers between tensors of a graph."""
    model = keras.Model(inputs, outputs, name=name, dtype=policy)
    # The layers pass masks on; by default Keras would warn that the model doesn't.
    model.supports_masking = True
    model.compute_mask = lambda inputs, previous_mask: None
    return model


class PlacedGraph(keras.Model):
    """A model that makes the calls of a graph in the order of the model itself, each in a scope.

    Inputs and outputs are lists of the graph's tensors.

    Args:
        graph: the graph.
        numbers: each call's device.
        scope: gives the scope of a device.
        policy: the model's types.
    """

    def __init__(self, graph: Graph, numbers: Sequence[int], scope: Any, policy: Any):
        super().__init__(name="stages", dtype=policy, autocast=False)
        # The layers pass masks on; by default Keras would warn that the model doesn't.
        self.supports_masking = True
        self.parts = [call.layer for call in graph.calls]
        self.graph, self.numbers, self._scope = graph, tuple(numbers), scope
        self.built = True

    def call(self, inputs: list[Any], training: bool | None = None) -> list[Any]:
        """Makes the calls, each on the results of earlier ones."""
        tensors = dict(zip(map(id, self.graph.inputs), inputs))
        for call, number in sorted(
            zip(self.graph.calls, self.numbers), key=lambda one: one[0].turn
        ):
            args, kwargs = keras.tree.map_structure(
                lambda part: tensors[id(part)] if isinstance(part, keras.KerasTensor) else part,
                call.arguments,
            )
            # Functional models check this too; Keras has no public way.
            if training is not None and "training" in getattr(call.layer, "_call_context_args", ()):
                kwargs["training"] = training
            with self._scope(number):
                made = keras.tree.flatten(call.layer(*args, **kwargs))
            tensors.update(zip(map(id, keras.tree.flatten(call.result)), made))
        return [tensors[id(one)] for one in self.graph.outputs]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """Returns no mask: the layers have already set the outputs' masks."""
