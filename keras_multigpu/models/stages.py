"""The stages of a model's graph: each a part of it, on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.models.graph import Graph
from keras_multigpu.models.part import Part


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A part of a graph that runs on one device.

    Attributes:
        device: the number of its device.
        inputs: the graph's tensors that it takes.
        outputs: those that it makes for others.
        replicas: its one replica.
    """

    device: int
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    replicas: engines.Replicas


class Stages:
    """A graph cut where its calls change devices, as seldom as their order allows.

    A stage's level is the number of changes on the way to it; the calls of one level and one
    device are a stage. So stages come one after the other by their levels, and those of one
    level run at once. A layer that is called several times, and may have a state, is called in
    the order of one device.

    Args:
        graph: the graph.
        numbers: the number of each call's device.
        devices: the devices' names.
        policy: the dtype policy of the model.
    """

    def __init__(self, graph: Graph, numbers: Sequence[int], devices: Sequence[str], policy: Any):
        self.graph = graph
        self.numbers = tuple(numbers)
        self._devices = tuple(devices)
        self._policy = policy
        parts: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(zip(self._levels(), numbers)):
            parts.setdefault(key, []).append(place)
        self.stages = tuple(self._stage(*key, parts[key]) for key in sorted(parts))

    def run(
        self, values: Sequence[Any], training: bool | None, compiled: bool
    ) -> tuple[list[Any], list[Any]]:
        """Calls the stages one after the other, each on its device, and assigns their state.

        Args:
            values: the graph's inputs.
            training: as in a call of a model.
            compiled: compile each stage with XLA.

        Returns:
            The graph's outputs, and the losses that the layers added.
        """
        tensors = dict(zip(map(id, self.graph.inputs), values))
        losses: list[Any] = []
        for stage in self.stages:
            call = (([tensors[id(one)] for one in stage.inputs],), {"training": training})
            (result,) = stage.replicas.run([call], [1], compiled=compiled)
            for variable, value in result.updates:
                variable.assign(value)
            losses += result.losses
            made = keras.tree.flatten(result.outputs)
            tensors.update(zip(map(id, stage.outputs), made))
        return [tensors[id(one)] for one in self.graph.outputs], losses

    def retrace(self) -> None:
        """Has all stages traced anew."""
        for stage in self.stages:
            stage.replicas.retrace()

    def _levels(self) -> list[int]:
        levels: dict[int, int] = {}
        latest: dict[int, int] = {}  # the place of the latest call of each layer
        producers = self.graph.producers()
        for place in sorted(range(len(self.graph.calls)), key=self._turn):
            call, number = self.graph.calls[place], self.numbers[place]
            before = [producers[id(tensor)] for tensor in call.inputs if id(tensor) in producers]
            if id(call.layer) in latest:
                before.append(latest[id(call.layer)])
            changes = [levels[one] + (self.numbers[one] != number) for one in before]
            levels[place] = max(changes, default=0)
            latest[id(call.layer)] = place
        return [levels[place] for place in range(len(levels))]

    def _turn(self, place: int) -> int:
        return self.graph.calls[place].turn

    def _stage(self, level: int, number: int, places: Sequence[int]) -> Stage:
        inputs, outputs = self.graph.ends(places)
        calls = [self.graph.calls[place] for place in sorted(places, key=self._turn)]
        # A replica gives something, even where others need nothing of it.
        outputs = outputs or list(calls[-1].outputs)
        model = Part(calls, inputs, outputs, f"stage_{level}_on_{number}", self._policy)
        replicas = engines.current().make_replicas([model], [self._devices[number]])
        return Stage(number, tuple(inputs), tuple(outputs), replicas)
