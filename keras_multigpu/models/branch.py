"""Model mode: the layers of one model on different devices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.models import checks
from keras_multigpu.models.base import ParallelModel
from keras_multigpu.models.crossings import find_crossings
from keras_multigpu.models.graph import is_graph, part_of_graph, read_graph, symbolic_ends
from keras_multigpu.models.placement import (
    check_placement,
    choose_placement,
    place_by_names,
)
from keras_multigpu.models.stages import Stages


@keras.saving.register_keras_serializable(package="keras_multigpu")
class ModelParallel(ParallelModel):
    """One model with its layers, and their weights, on different devices.

    On TensorFlow the graph is cut into stages, each on one device; what crosses between devices
    is the outputs of stages, and their gradients. On JAX large layers are spread over all devices.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        placement: the number of each layer's device, by the layer's name or a regular
            expression; `None` to have it chosen.
    """

    mode = "model"
    _parallel_on_fewer_devices = "The layers of the other devices are on these."
    _parallel_spreads_weights = True
    _parallel_stages: Stages | None = None
    _parallel_axes: tuple[tuple[str, int], ...] = ()
    _parallel_homes: tuple[tuple[keras.Variable, str], ...] = ()

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | None = None,
    ):
        given = None if placement is None else {name: int(n) for name, n in placement.items()}
        super().__init__(template, devices, {"placement": given})
        if template.built:
            self._parallel_lay_out()

    @classmethod
    def _parallel_check(
        cls, template: keras.Model, devices: Sequence[str], options: dict[str, Any]
    ) -> None:
        """Refuses what model mode can't do.

        Raises:
            ValueError: if the placement does not fit the model and the devices, or the model's
                layers can't be placed.
        """
        engine = engines.current()
        checks.check_names(template, ("placement", "stages"))
        placement = options.get("placement")
        if engine.partitions:
            engine.check_process()
            checks.check_chosen_only(placement)
            if template.built:
                engine.find_shards(template, len(devices))
            return
        check_placement(placement, len(devices))
        checks.check_graph(template, is_graph(template))
        if template.built and placement:
            place_by_names(read_graph(template), placement)

    @classmethod
    def _parallel_options_here(cls, options: dict[str, Any], count: int) -> dict[str, Any]:
        placement = options.get("placement")
        if placement is None:
            return options
        return {**options, "placement": {name: n % count for name, n in placement.items()}}

    @classmethod
    def _parallel_fitting(cls, template: keras.Model, devices: tuple[str, ...]) -> tuple[str, ...]:
        """As many devices as the weights can be spread over, on a backend that spreads them."""
        engine = engines.current()
        if engine.partitions and template.built:
            while len(devices) > 1 and not _can_spread(template, len(devices)):
                devices = devices[:-1]
        return devices

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the template, and places its layers."""
        super().build(*args, **kwargs)
        self._parallel_lay_out()

    def _parallel_build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._parallel_build(args, kwargs)
        # The step in which the template is built goes on: it has used no variable before.
        names = ("train_function", "test_function", "predict_function")
        functions = {name: getattr(self, name) for name in names}
        engines.in_fresh_thread(self._parallel_lay_out)
        for name, function in functions.items():
            setattr(self, name, function)

    def _parallel_lay_out(self) -> None:
        """Puts the weights where their layers are to be, and cuts the graph."""
        engine = engines.current()
        if engine.partitions:
            axes = engine.find_shards(self.template, len(self.devices))
            engine.shard(self.template, axes, self.devices)
            self._parallel_axes = tuple(axes.items())
            return
        graph, count = read_graph(self.template), len(self.devices)
        placement = self._parallel_options["placement"]
        if placement is None:
            numbers = choose_placement(graph, count)
        else:
            numbers = place_by_names(graph, placement)
        homes = {
            id(variable): (variable, self.devices[number])
            for call, number in reversed([*zip(graph.calls, numbers)])
            for variable in call.variables
        }
        # Kept from Keras, which would take the variables for this model's own.
        self._parallel_homes = tuple(homes.values())
        engine.move_variables(self._parallel_homes, self.template)
        policy = self.template.dtype_policy
        self._parallel_stages = Stages(graph, numbers, self.devices, policy)
        # Takes the inputs as the template does, and gives them as a list.
        inputs, _ = symbolic_ends(self.template)
        entry = part_of_graph(inputs, self.template.inputs, "entry", policy)
        self._parallel_entry = entry

    @property
    def placement(self) -> dict[str, int]:
        """The number of each layer's device, by the layer's name after those of its models.

        On JAX: the axis along which a weight is spread over the devices, by the weight's path.
        """
        if self._parallel_stages is None:
            return dict(self._parallel_axes)
        paths = ("/".join(call.path) for call in self._parallel_stages.graph.calls)
        return dict(zip(paths, self._parallel_stages.numbers))

    @property
    def stages(self) -> Stages | None:
        """The parts of the graph, each on one device; on JAX there are none."""
        return self._parallel_stages

    def _parallel_least_bytes(self, rows: int) -> int | None:
        """As in all modes: here what the placement chosen by default would have to send."""
        if self._parallel_stages is None:
            return None
        graph = self._parallel_stages.graph
        chosen = choose_placement(graph, len(self.devices))
        between = [one for one in find_crossings(graph, chosen) if one.maker is not None]
        return sum(one.bytes(rows) for one in between)

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if engines.current().partitions:
            return self.template(*args, **kwargs)
        assert self._parallel_stages is not None
        given = inspect.signature(self.template.call).bind(*args, **kwargs).arguments
        values = keras.tree.flatten(self._parallel_entry(given["inputs"], mask=given.get("mask")))
        outputs, losses = self._parallel_stages.run(values, given.get("training"), self.jit_compile)
        for loss in losses:
            # Not `self.add_loss`: a functional model has it for symbolic losses only.
            keras.Layer.add_loss(self, loss)
        return keras.tree.pack_sequence_as(symbolic_ends(self.template)[1], outputs)

    def _parallel_place(self) -> None:
        """Puts the weights on their layers' devices, where they are not on them."""
        if self._parallel_homes:
            engines.current().move_variables(self._parallel_homes, self.template)

    def _parallel_make_step(self, make: Any, made: Any, force: bool) -> Any:
        self._parallel_place()
        return super()._parallel_make_step(make, made, force)

    def _parallel_retrace(self) -> None:
        if self._parallel_stages is not None:
            self._parallel_stages.retrace()

    def _parallel_check_change(self, method: str) -> None:
        raise ValueError(
            "The layers of a model are placed once, when it is made parallel. Received: a call of "
            f"`{method}`. Change the template's layers, and make it parallel again."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Not in `compile`: Keras compiles a loaded model only if that is its own.
        if name == "optimizer" and value is not None:
            engines.current().place_updates(value, self)


def _can_spread(template: keras.Model, count: int) -> bool:
    try:
        engines.current().find_shards(template, count)
    except ValueError:
        return False
    return True
