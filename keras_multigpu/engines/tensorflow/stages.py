"""Model mode on TensorFlow: cuts a graph into stages, and runs each on one device."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.runners import ModelRunner
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.placed import Placed
from keras_multigpu.engines.tensorflow.places import Places
from keras_multigpu.engines.tensorflow.weights.placing import (
    following,
    leave_to_one_device,
    move_variables,
    place_updates,
)
from keras_multigpu.engines.tensorflow.wide import WideRunner
from keras_multigpu.engines.values import Call, Request, Result
from keras_multigpu.engines.wide import SPREAD, usable
from keras_multigpu.graphs.costs import find_crossings, with_loss
from keras_multigpu.graphs.graph import Graph, is_graph, read_graph, symbolic_ends
from keras_multigpu.graphs.placement import check_placement, choose_placement, place_by_names
from keras_multigpu.graphs.subgraph import SubGraph, part_of_graph


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A part of a graph that runs on one device.

    Attributes:
        device: the device's number.
        inputs: its inputs, as tensors of the graph.
        outputs: its outputs that are used elsewhere.
        model: computes it.
    """

    device: int
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    model: keras.Model


class StageRunner(ModelRunner):
    """Runs the stages of a graph in order, each on its device."""

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        assert not isinstance(placement, str)
        self._template = template
        self._devices = tuple(devices)
        self.partition = Placed(list(map(full_name, devices)))
        self._placement = placement
        self._stages: Stages | None = None
        self._homes: tuple[tuple[keras.Variable, str], ...] = ()

    @classmethod
    def make(
        cls,
        template: keras.Model,
        devices: Sequence[str],
        placement: Mapping[str, int] | str | None,
    ) -> ModelRunner:
        kind = WideRunner if _is_wide(template, placement) else cls
        return kind(template, devices, placement=placement)

    @classmethod
    def check(cls, request: Request) -> None:
        template, placement = request.template, request.options.get("placement")
        if _is_wide(template, placement):
            WideRunner.check(request)
            return
        check_placement(placement, len(request.devices))
        _check_graph(template)
        if template.built and placement:
            place_by_names(read_graph(template), placement)

    @classmethod
    def adapt(cls, request: Request) -> Request:
        if not _is_wide(request.template, request.options.get("placement")):
            return request
        return dataclasses.replace(request, devices=usable(request.template, request.devices))

    def lay_out(self) -> None:
        in_fresh_thread(self._lay_out)

    def _lay_out(self) -> None:
        graph, template = read_graph(self._template), self._template
        if self._placement is None:
            numbers = choose_placement(graph, len(self._devices))
        else:
            numbers = place_by_names(graph, self._placement)
        # Reversed, so that a shared variable gets the device of its first call.
        homes = {
            id(variable): (variable, self._devices[number])
            for call, number in reversed([*zip(graph.calls, numbers)])
            for variable in call.variables
        }
        self._homes = tuple(homes.values())
        self.place()
        self._stages = Stages(graph, numbers, template.dtype_policy)
        # Maps the template's inputs to the graph's list of inputs.
        inputs, _ = symbolic_ends(template)
        self._entry = part_of_graph(inputs, template.inputs, "entry", template.dtype_policy)

    def place(self) -> None:
        move_variables(self._homes, self._template)
        leave_to_one_device(self._template)

    def run(self, call: Call) -> Result:
        assert self._stages is not None
        args, kwargs = call
        given = inspect.signature(self._template.call).bind(*args, **kwargs).arguments
        values = keras.tree.flatten(self._entry(given["inputs"], mask=given.get("mask")))
        outputs = self._stages.run(values, given.get("training"), self.partition.places)
        return Result(keras.tree.pack_sequence_as(symbolic_ends(self._template)[1], outputs))

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        return following(
            lambda: self.partition.function(step, bool(jit_compile)), step, [self._template]
        )

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        place_updates(optimizer)

    @property
    def placement(self) -> dict[str, int]:
        if self._stages is None:
            return {}
        paths = ("/".join(call.path) for call in self._stages.graph.calls)
        return dict(zip(paths, self._stages.numbers))

    @property
    def stages(self) -> Stages | None:
        return self._stages

    def least_bytes(self, rows: int) -> int | None:
        if self._stages is None:
            return None
        graph = self._stages.graph
        chosen = choose_placement(graph, len(self._devices))
        crossings = find_crossings(*with_loss(graph, chosen))
        return sum(one.bytes(rows) for one in crossings if one.maker is not None)

    def retrace(self) -> None:
        """Steps are traced anew whenever Keras makes a step function."""


class Stages:
    """A graph's calls, grouped into stages by level and device.

    A call's level is the largest number of device changes on a path to it. Stages run in the order
    of their levels; those of one level can run at once. Calls of the same layer keep their order,
    because the layer may have a state. `numbers` holds each call's device number.
    """

    def __init__(self, graph: Graph, numbers: Sequence[int], policy: Any):
        self.graph = graph
        self.numbers = tuple(numbers)
        self._policy = policy
        parts: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(zip(self._levels(), numbers)):
            parts.setdefault(key, []).append(place)
        self.stages = tuple(self._stage(*key, parts[key]) for key in sorted(parts))

    def run(self, values: Sequence[Any], training: bool | None, places: Places) -> list[Any]:
        """Runs the stages; returns the outputs."""
        tensors = dict(zip(map(id, self.graph.inputs), values))
        for stage in self.stages:
            with places.part(stage.device):
                made = stage.model([tensors[id(one)] for one in stage.inputs], training=training)
            tensors.update(zip(map(id, stage.outputs), made))
        return [tensors[id(one)] for one in self.graph.outputs]

    def _levels(self) -> list[int]:
        levels: dict[int, int] = {}
        latest: dict[int, int] = {}  # index of each layer's latest call
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
        model = SubGraph(calls, inputs, outputs, f"stage_{level}_on_{number}", self._policy)
        return Stage(number, tuple(inputs), tuple(outputs), model)


def _is_wide(template: keras.Model, placement: Any) -> bool:
    """Whether layers are spread: the user's choice, or that for models which can't be cut."""
    return placement == SPREAD or (placement is None and not is_graph(template))


def _check_graph(template: keras.Model) -> None:
    """Raises a `ValueError` unless a model is a plain graph without optional inputs."""
    if not is_graph(template):
        raise ValueError(
            "Model mode places the layers of a graph: of a Sequential or functional model without "
            f"a `call` of its own. Received: {template.name!r}, of class "
            f"{type(template).__name__}, which has one. Leave `placement` out to spread its large "
            "layers over all devices, rebuild it as `keras.Model(inputs, outputs)`, or use "
            "`mode='data'`."
        )
    for layer in all_layers(template):
        if isinstance(layer, keras.layers.InputLayer) and getattr(layer, "optional", False):
            raise ValueError(
                "Every input of a model in mode 'model' must be given. Received: a model with the "
                f"input {layer.name!r}, which has optional=True. Give zeros in its place, or use "
                "`mode='data'`."
            )
