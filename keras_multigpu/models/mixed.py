"""A parallel model whose replicas' outputs are mixed into one, and can be looked at one by one."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import keras
import numpy as np

from keras_multigpu.layers.mixing import get_mix
from keras_multigpu.models.base import ParallelModel


@dataclasses.dataclass
class Now:
    """What changes from one use of the model to the next.

    Attributes:
        symbolic_outputs: those of the mix in use, where the template has symbolic outputs.
        unmixed: whether the replicas' outputs are wanted by themselves, and if so, whether as in
            training; `None` where the mix is wanted.
        mixed: the outputs of the latest call.
        outputs: the replicas' outputs of which these are the mix.
    """

    symbolic_outputs: Any = None
    unmixed: bool | None = None
    mixed: Any = None
    outputs: list[Any] = dataclasses.field(default_factory=list)


class MixedModel(ParallelModel):
    """What a mode needs that mixes the outputs of several replicas.

    Attributes:
        now: what changes from one use of the model to the next.
    """

    _mix: keras.Layer
    compiled: bool
    now: Now

    @property
    def replicas(self) -> tuple[keras.Model, ...]:
        """The replicas as Keras models: implemented by the mode."""
        raise NotImplementedError

    @property
    def mix(self) -> keras.Layer:
        """The layer that mixes the outputs.

        It can be set to all that the option `mix` takes. The model must then be compiled again
        if the old layer or the new one has weights.
        """
        return self._mix

    @mix.setter
    def mix(self, value: Any) -> None:
        had_weights = "_mix" in vars(self) and bool(self._mix.variables)
        if "_mix" in vars(self):
            del self._mix  # Keras goes on tracking a layer that is merely replaced
        self._mix = get_mix(value)
        self.train_function = self.test_function = self.predict_function = None
        self._now.symbolic_outputs = None
        if self._template.built and getattr(self._template, "inputs", None):
            self._build_mix()
        if self.compiled and (had_weights or self._mix.variables):
            self.compiled = False

    def _build_mix(self) -> None:
        """Builds the mix of a template with symbolic inputs, and keeps the symbolic outputs."""
        inputs = symbolic_inputs(self._template)
        self._now.symbolic_outputs = self.compute_output_spec(inputs)

    def _keeps_outputs(self) -> bool:
        if self._now.symbolic_outputs is None:
            return True
        outputs = zip(self._template.outputs, self.outputs)
        return all(before.shape == after.shape for before, after in outputs)

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """The mix's symbolic outputs, of a template that has symbolic ones."""
        self._template.outputs  # noqa: B018  the template's error where there are none
        return keras.tree.flatten(self._now.symbolic_outputs)

    @property
    def output_names(self) -> list[str] | None:
        """The template's names of the outputs, if the mix has as many."""
        names = getattr(self._template, "output_names", None)
        return names if names and len(names) == len(self.outputs) else None

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's symbolic outputs."""
        outputs = self._template.compute_output_spec(*args, **kwargs)
        return self._mix_outputs([outputs] * len(self.replicas), features_of(args, kwargs))

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's output shapes."""
        shapes = self._template.compute_output_shape(*args, **kwargs)
        return self._mix.compute_output_shape([shapes] * len(self.replicas))

    def _mix_outputs(self, outputs: list[Any], features: Any) -> Any:
        if "features" in inspect.signature(self._mix.call).parameters:
            return self._mix(outputs, features=features)
        return self._mix(outputs)

    def predict_step(self, *args: Any) -> Any:
        """The step of `predict`: the template's own, where it has one, for the mix."""
        if self._now.unmixed is None:
            return super().predict_step(*args)
        return keras.Model.predict_step(self, *args)

    def predict_replicas(self, x: Any, *, training: bool = False, **kwargs: Any) -> list[Any]:
        """Predicts with every replica by itself.

        Args:
            x: as in `predict`.
            training: call the replicas as in training, so that random layers draw; nothing but
                their seeds is changed. Shared replicas differ only so.
            **kwargs: those of `predict`: `batch_size`, `verbose`, `steps`, `callbacks`.

        Returns:
            A list with what `predict` of each replica gives.
        """
        kept = self.predict_function
        self.predict_function = self._unmixed_functions.get(training)
        self._now.unmixed = training
        try:
            return self.predict(x, **kwargs)
        finally:
            self._unmixed_functions[training] = self.predict_function
            self.predict_function, self._now.unmixed = kept, None

    def disagreement(self, x: Any, *, training: bool = False, **kwargs: Any) -> Any:
        """How far the replicas' outputs are apart, sample by sample.

        Args:
            x: as in `predict`.
            training: as in `predict_replicas`.
            **kwargs: those of `predict`.

        Returns:
            In the structure of the outputs, arrays of shape `(rows,)`: the standard deviation over
            the replicas, as the root of its mean square over all values of a sample.
        """
        outputs = self.predict_replicas(x, training=training, **kwargs)

        def spread(*parts: np.ndarray) -> np.ndarray:
            variance = np.var(np.stack(parts).astype("float64"), axis=0)
            return np.sqrt(variance.reshape(len(variance), -1).mean(axis=1))

        return keras.tree.map_structure(spread, *outputs)


def features_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a model among the arguments of its call."""
    return args[0] if args else next(iter(kwargs.values()))


def symbolic_inputs(template: keras.Model) -> Any:
    """The symbolic inputs of a built template, in its own structure."""
    return template.inputs[0] if isinstance(template, keras.Sequential) else template.input
