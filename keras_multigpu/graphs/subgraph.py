"""Models made of parts of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.graphs.graph import LayerCall


def part_of_graph(inputs: Any, outputs: Any, name: str, policy: Any) -> keras.Model:
    """The model between tensors of a graph."""
    model = keras.Model(inputs, outputs, name=name, dtype=policy)
    # Its layers hand masks on; left to itself Keras would warn that the model doesn't.
    model.supports_masking = True
    model.compute_mask = lambda inputs, previous_mask: None
    return model


class SubGraph(keras.Model):
    """Some calls of a graph.

    Keras's own functional model of the same tensors may call the layers in another order than
    the whole model does, and takes no tensors that two calls of one layer are on the way between.

    Args:
        calls: the calls, in the order in which they are made.
        inputs: the tensors of the graph that the part takes, as a list.
        outputs: those that it gives, as a list.
        name: its name.
        policy: its dtype policy.
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
        # Its layers hand masks on; left to itself Keras would warn that the model doesn't.
        self.supports_masking = True
        self.parts = [call.layer for call in calls]
        self._calls = tuple(calls)
        self._ends = (tuple(map(id, inputs)), tuple(map(id, outputs)))
        self.built = True

    def call(self, inputs: list[Any], training: bool | None = None) -> list[Any]:
        """Makes the calls with what the ones before gave."""
        taken, given = self._ends
        tensors = dict(zip(taken, inputs))
        for call in self._calls:
            args, kwargs = keras.tree.map_structure(
                lambda part: tensors[id(part)] if isinstance(part, keras.KerasTensor) else part,
                call.arguments,
            )
            # As a functional model does, for which Keras has no public question either.
            if training is not None and "training" in getattr(call.layer, "_call_context_args", ()):
                kwargs["training"] = training
            made = keras.tree.flatten(call.layer(*args, **kwargs))
            tensors.update(zip(map(id, keras.tree.flatten(call.result)), made))
        return [tensors[key] for key in given]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """The layers have given the outputs their masks already."""
