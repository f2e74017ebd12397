"""How a parallel model describes itself: layers, symbolic outputs, metrics, a summary."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from keras_multigpu.graphs.graph import symbolic_ends
from keras_multigpu.modes.forgotten import warn_of_cloning
from keras_multigpu.modes.stepped import SteppedModel


class DescribedModel(SteppedModel):
    """A model that Keras, and people, see as they see its template."""

    # The outputs by which Keras describes the model, and those of its call that belong to them.
    _parallel_called: tuple[list[Any], Any] = ([], None)

    @property
    def layers(self) -> list[keras.Layer]:
        """The template's layers."""
        warn_of_cloning(self)
        return self.template.layers

    @property
    def output(self) -> Any:
        """The symbolic outputs, of a call of this model on its symbolic inputs."""
        if _is_read_by_keras("output"):
            return super().output
        return self._parallel_call_for(self._parallel_described_outputs())

    @property
    def outputs(self) -> Any:
        """The symbolic outputs as a list, of a call of this model on its symbolic inputs."""
        described = self._parallel_described_outputs()
        if _is_read_by_keras("outputs"):
            return described
        made = self._parallel_call_for(described)
        return made if made is described else keras.tree.flatten(made)

    @outputs.setter
    def outputs(self, value: Any) -> None:
        self.template.outputs = value  # of a user's class, which may have such an attribute

    def _parallel_described_outputs(self) -> Any:
        """The list of symbolic outputs by which Keras describes the model."""
        return self.template.outputs

    def _parallel_call_for(self, described: Any) -> Any:
        """The outputs of a call; what is not symbolic (an attribute of a user's) as it is.

        A model that is built on them calls this one; on the template's it would run on one device.
        """
        tensors = keras.tree.flatten(described)
        if not any(isinstance(one, keras.KerasTensor) for one in tensors):
            return described
        before, made = self._parallel_called
        if list(map(id, tensors)) != list(map(id, before)):  # they have changed since
            made = self(symbolic_ends(self.template)[0])
            self._parallel_called = tensors, made
        return made

    def _run_through_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the template's graph for `keras.models.clone_model`."""
        warn_of_cloning(self)
        return self.template._run_through_graph(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The template's symbolic outputs."""
        return self.template.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The template's output shapes."""
        return self.template.compute_output_shape(*args, **kwargs)

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics; those of layers in the template's order, by which equal names are told."""
        places = {id(metric): place for place, metric in enumerate(self.template.metrics)}
        found = super().metrics
        shared = sorted((one for one in found if id(one) in places), key=lambda m: places[id(m)])
        ordered = iter(shared)
        return [next(ordered) if id(one) in places else one for one in found]

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the template's summary, the mode, the devices, and what the replicas add up to."""
        more = [layer for layer in self._parallel_layers() if layer.variables]
        # Keras's totals would count replicas and a mix that its rows don't show.
        (self.template.summary if more else super().summary)(*args, **kwargs)
        show = kwargs.get("print_fn") or (args[2] if len(args) > 2 else None) or print
        show(f" Parallel: {self._parallel_describe()}")
        if more:
            parts = [f"{layer.count_params():,} of {layer.name!r}" for layer in more]
            own = f"{self.template.count_params():,} of {self.template.name!r}"
            show(f" Parameters: {own} + {' + '.join(parts)} = {self.count_params():,}")

    def _parallel_describe(self) -> str:
        """The mode and the devices in a few words."""
        return f"mode {self.mode!r} on {', '.join(self.devices)}"

    def __repr__(self) -> str:
        built = f"name={self.name}, built={self.built}"
        return f"<{type(self).__name__} {built}, {self._parallel_describe()}>"


def _is_read_by_keras(name: str) -> bool:
    """Whether Keras, or this library, reads a property: the property's function asks this."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_name in ("_is_read_by_keras", name, "__getattribute__"):
        frame = frame.f_back
    reader = frame.f_globals.get("__name__", "") if frame else ""
    return reader.partition(".")[0] in ("keras", "keras_multigpu")
