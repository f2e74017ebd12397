"""How the outputs of replicas become one: the mix, how it is called, and the losses that fit it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.engines import is_array, reason_of
from keras_multigpu.graphs.graph import symbolic_ends
from keras_multigpu.layers.gaussian import (
    GaussianMix,
    find_of_all_columns,
    has_gaussians,
    reads_gaussians,
)
from keras_multigpu.layers.mixing import check_keeps_rows, get_mix, is_average
from keras_multigpu.layers.outputs import Mix
from keras_multigpu.modes.base import ParallelModel


class MixedModel(ParallelModel):
    """The parts of a mode that mixes the outputs of several replicas."""

    _parallel_mix: Any = None
    _parallel_mix_has_weights = False  # decided when the mix is set, so that a training keeps it
    _parallel_clones: Sequence[keras.Model] = ()
    _parallel_mixed_symbols: Any = None  # the symbolic outputs, if the template has some
    _parallel_told: list[str] | None = None  # metrics of which a warning has told
    compiled: bool

    @property
    def replicas(self) -> tuple[keras.Model, ...]:
        """The replicas as Keras models: the template, and its clones or itself again."""
        if self._parallel_options["replicas"] == "independent":
            return (self.template, *self._parallel_clones)
        return (self.template,) * self._parallel_options["num_replicas"]

    def _parallel_layers(self) -> list[keras.Layer]:
        mix = self._parallel_mix
        return [*self._parallel_clones, *([] if mix is None else [mix])]

    @property
    def mix(self) -> keras.Layer:
        """The layer that mixes the outputs.

        Set it to any value of the option `mix`. Compile the model again if the old or the new layer
        has weights.
        """
        return self._parallel_mix

    @mix.setter
    def mix(self, value: Any) -> None:
        mix, before = get_mix(value), self._parallel_mix
        self._parallel_mixed_symbols = self._parallel_build_mix(mix)
        # A layer that was not built then counts as one with weights.
        had_weights = before is None or self._parallel_mix_has_weights or _has_weights(before)
        self._parallel_mix, self._parallel_mix_has_weights = mix, _has_weights(mix)
        self.train_function = self.test_function = self.predict_function = None
        is_changed = had_weights or self._parallel_mix_has_weights
        if self.compiled and (is_changed or not _is_fit_by(mix, self.loss)):
            self.compiled, self._parallel_undone = False, "mix"

    def _parallel_build_mix(self, mix: keras.Layer) -> Any:
        """Builds a mix for a template with symbolic inputs, and returns the symbolic outputs."""
        if not self.template.built or not getattr(self.template, "inputs", None):
            return None
        inputs, _ = symbolic_ends(self.template)
        outputs = [self.template.compute_output_spec(inputs)] * len(self.replicas)
        try:
            mixed = call_mix(mix, outputs, inputs)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            if isinstance(mix, Mix) and not isinstance(mix, keras.layers.Lambda):
                raise  # one of ours: it says what it needs
            given = mix.function if isinstance(mix, keras.layers.Lambda) else mix
            raise ValueError(
                f"`mix` must take one list, of the outputs of the {len(outputs)} replicas, and mix "
                f"them with Keras's operations (`keras.ops`). Received: mix={given!r}, which "
                f"fails: {reason_of(error)}."
            ) from error
        if isinstance(mix, keras.layers.Lambda):
            check_keeps_rows(mix, outputs[0], len(outputs))
        return mixed

    def _parallel_on_compiling(self, name: str, value: Any) -> None:
        if name == "loss" and not _is_fit_by(self._parallel_mix, value):
            self.compiled = False  # Keras has taken parts of it by now
            raise ValueError(
                "A Gaussian mix gives means and variances, which `GaussianNLL` compares with the "
                "targets; another loss would fit the variances to the targets too. Received: "
                f"loss={value!r}. Compile with `loss=keras_multigpu.layers.GaussianNLL()`; make "
                "another loss of means and variances a subclass of it."
            )
        if name == "loss" and is_average(self._parallel_mix) and has_gaussians(value):
            warnings.warn(
                "`GaussianNLL` reads means and variances, and this mix averages the columns of the "
                "replicas as they are: a variance that is not above 0 makes the loss NaN. "
                f"Received: loss={value!r}. Make the model with `mix='gaussian'`, or let its last "
                "layer give variances above 0.",
                stacklevel=3,
            )

    def _parallel_end(self, method: str) -> None:
        if method == "predict" or not isinstance(self._parallel_mix, GaussianMix):
            return
        found = find_of_all_columns(self.metrics) if self.compiled else []
        if found and found != self._parallel_told:
            self._parallel_told = found
            warnings.warn(
                f"Metrics compare the targets with a Gaussian mix's variances too. Received: "
                f"{', '.join(map(repr, found))}. Use `keras_multigpu.layers.GaussianRMSE()`, or a "
                "function of the means, the first half of the columns.",
                stacklevel=4,
            )

    def _parallel_keeps_outputs(self) -> bool:
        if not _is_fit_by(self._parallel_mix, self.template.loss):
            return False
        if self._parallel_mixed_symbols is None:
            return True
        before, after = self.template.outputs, self.outputs
        return [one.shape for one in before] == [one.shape for one in after]

    def _parallel_described_outputs(self) -> list[keras.KerasTensor]:
        """The mix's symbolic outputs, if the template has symbolic outputs."""
        self.template.outputs  # noqa: B018  the template's error where there are none
        return keras.tree.flatten(self._parallel_mixed_symbols)

    @property
    def output_names(self) -> list[str] | None:
        """The template's names of the outputs, if the mix has the same number."""
        names = getattr(self.template, "output_names", None)
        return names if names and len(names) == len(self.outputs) else None

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's symbolic outputs."""
        self._parallel_runner.lend()
        outputs = self.template.compute_output_spec(*args, **kwargs)
        outputs = [outputs] * len(self.replicas)
        return call_mix(self._parallel_mix, outputs, features_of(args, kwargs))

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's output shapes."""
        shapes = self.template.compute_output_shape(*args, **kwargs)
        return self._parallel_mix.compute_output_shape([shapes] * len(self.replicas))

    @property
    def trainable(self) -> bool:
        """Whether the template is trainable, or the mix has trainable weights."""
        return self.template.trainable or bool(self._parallel_mix.trainable_variables)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.template.trainable = value
        if self._parallel_mix is not None:
            self._parallel_mix.trainable = value


def features_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a model among the arguments of its call."""
    given = (*args, *kwargs.values())
    arrays = (one for one in given if any(map(_is_tensor_or_symbol, keras.tree.flatten(one))))
    return next(arrays, given[0] if given else None)


def _is_tensor_or_symbol(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor) or is_array(value)


def call_mix(mix: keras.Layer, outputs: list[Any], features: Any) -> Any:
    """Calls a mix, with the inputs of the model if it takes them."""
    takes_features = "features" in inspect.signature(mix.call).parameters
    return mix(outputs, features=features) if takes_features else mix(outputs)


def _is_fit_by(mix: Any, loss: Any) -> bool:
    """Whether a loss reads what a mix gives."""
    return not isinstance(mix, GaussianMix) or reads_gaussians(loss)


def _has_weights(mix: keras.Layer) -> bool:
    """Whether a mix has weights, or may get some when it is built."""
    never = (keras.layers.Lambda, GaussianMix)
    return bool(mix.variables) or not (mix.built or isinstance(mix, never))
