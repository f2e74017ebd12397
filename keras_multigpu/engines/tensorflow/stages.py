"""Model mode on TensorFlow: runs the layers of a graph in order, each on its device."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.runners import ModelRunner
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.placed import Placed
from keras_multigpu.engines.tensorflow.weights.placing import (
    FollowingRunner,
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


class StageRunner(FollowingRunner, ModelRunner):
    """Runs the layers of a graph in order, each on its device."""

    spreads_steps = False

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        assert not isinstance(placement, str)
        self._template, self.models = template, (template,)
        self._devices = tuple(devices)
        self.partition = Placed(list(map(full_name, devices)))
        self._placement = placement
        self.stages: PlacedGraph | None = None
        self._homes: tuple[tuple[keras.Variable, str], ...] = ()

    @classmethod
    def make(
        cls, template: keras.Model, devices: Sequence[str], options: Mapping[str, Any]
    ) -> ModelRunner:
        kind = WideRunner if _is_wide(template, options["placement"]) else cls
        return kind(template, devices, **options)

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
        scope = self.partition.places.part
        self.stages = PlacedGraph(graph, numbers, scope, template.dtype_policy)
        # Maps the template's inputs to the graph's list of inputs.
        inputs, outputs = symbolic_ends(template)
        self._ends = list(map(id, keras.tree.flatten(outputs)))
        self._entry = _part_of_graph(inputs, template.inputs, "entry", template.dtype_policy)

    def place(self) -> None:
        move_variables(self._homes, self._template)
        leave_to_one_device(self._template)

    def run(self, call: Call) -> Result:
        assert self.stages is not None
        args, kwargs = call
        given = inspect.signature(self._template.call).bind(*args, **kwargs).arguments
        _, ends = symbolic_ends(self._template)
        if list(map(id, keras.tree.flatten(ends))) != self._ends:
            raise ValueError(
                "The layers of a model are placed once, when it is made parallel. Received: "
                f"{self._template.name!r}, whose layers were changed since. Make it parallel again."
            )
        values = keras.tree.flatten(self._entry(given["inputs"], mask=given.get("mask")))
        outputs = self.stages(values, training=given.get("training"))
        return Result(keras.tree.pack_sequence_as(ends, outputs))

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        place_updates(optimizer)

    @property
    def placement(self) -> dict[str, int]:
        if self.stages is None:
            return {}
        paths = ("/".join(call.path) for call in self.stages.graph.calls)
        return dict(zip(paths, self.stages.numbers))

    def least_bytes(self, rows: int) -> int | None:
        if self.stages is None:
            return None
        graph = self.stages.graph
        chosen = choose_placement(graph, len(self._devices))
        crossings = find_crossings(*with_loss(graph, chosen))
        return sum(one.bytes(rows) for one in crossings if one.maker is not None)


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


def _part_of_graph(inputs: Any, outputs: Any, name: str, policy: Any) -> keras.Model:
    """Makes a model of the layers between tensors of a graph."""
    model = keras.Model(inputs, outputs, name=name, dtype=policy)
    # The layers pass masks on; by default Keras would warn that the model doesn't.
    model.supports_masking = True
    model.compute_mask = lambda inputs, previous_mask: None
    return model


def _is_wide(template: keras.Model, placement: Any) -> bool:
    """Whether layers are spread: the user's choice, or that for models which can't be cut."""
    return placement == SPREAD or (placement is None and not is_graph(template))


def _check_graph(template: keras.Model) -> None:
    """Raises a `ValueError` unless a model is a plain graph without optional inputs."""
    if not is_graph(template):
        is_unknown = type(template) is keras.Sequential
        why = "whose shapes Keras can't infer" if is_unknown else "which has one"
        raise ValueError(
            "Model mode places the layers of a graph: of a Sequential or functional model without "
            f"a `call` of its own. Received: {template.name!r}, of class "
            f"{type(template).__name__}, {why}. Leave `placement` out to spread its large "
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
