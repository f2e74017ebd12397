"""Parallel models that mix the outputs of their replicas, and can show them one by one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.graphs.graph import symbolic_ends
from keras_multigpu.layers.gaussian import GaussianMix, find_of_all_columns, has_gaussians
from keras_multigpu.layers.mixing import get_mix, is_average
from keras_multigpu.layers.outputs import shapes
from keras_multigpu.modes.base import ParallelModel
from keras_multigpu.modes.disagreement import spread, warn_if_zero, warn_of_one_replica
from keras_multigpu.modes.mixes import build_mix, call_mix, features_of, has_weights, is_fit_by


@dataclasses.dataclass
class LatestUse:
    """What a mixed model remembers from its latest use.

    Attributes:
        symbolic_outputs: the mix's symbolic outputs, if the template has symbolic outputs.
        unmixed: `None` for the mix; for single replicas, the `training` argument of
            their calls.
        mixed: the outputs of the latest call.
        outputs: the replicas' outputs that were mixed.
        losses: the losses of each replica's call.
        is_in_step: whether a step of Keras's is running.
        told: the metrics that read variances as predictions, and have been told.
        mix_loss: the mean of the mix's loss, where the replicas' own losses are reported.
    """

    symbolic_outputs: Any = None
    unmixed: bool | None = None
    mixed: Any = None
    outputs: list[Any] = dataclasses.field(default_factory=list)
    losses: list[Any] = dataclasses.field(default_factory=list)
    is_in_step: bool = False
    told: list[str] = dataclasses.field(default_factory=list)
    mix_loss: keras.Metric = dataclasses.field(
        default_factory=lambda: keras.metrics.Mean(name="mix_loss")
    )


class MixedModel(ParallelModel):
    """The parts of a mode that mixes the outputs of several replicas."""

    _parallel_mix: Any = None
    _parallel_mix_has_weights = False  # decided when the mix is set, so that a training keeps it
    _parallel_clones: Sequence[keras.Model] = ()
    compiled: bool
    _parallel_latest: LatestUse
    _parallel_unmixed_functions: dict[bool, Any]

    @property
    def replicas(self) -> tuple[keras.Model, ...]:
        """The replicas as Keras models: implemented by the mode."""
        raise NotImplementedError

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
        outputs = self._parallel_build_mix(mix)
        # A layer that was not built then counts as one with weights.
        had_weights = before is None or self._parallel_mix_has_weights or has_weights(before)
        self._parallel_mix, self._parallel_mix_has_weights = mix, has_weights(mix)
        self._parallel_latest.symbolic_outputs = outputs
        self.train_function = self.test_function = self.predict_function = None
        is_changed = had_weights or self._parallel_mix_has_weights
        if self.compiled and (is_changed or not is_fit_by(mix, self.loss)):
            self.compiled, self._parallel_undone = False, "mix"

    def _parallel_build_mix(self, mix: keras.Layer) -> Any:
        """Builds a mix for a template with symbolic inputs, and returns the symbolic outputs."""
        if not self.template.built or not getattr(self.template, "inputs", None):
            return None
        inputs, _ = symbolic_ends(self.template)
        outputs = self.template.compute_output_spec(inputs)
        return build_mix(mix, outputs, len(self.replicas), inputs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Not in `compile`: Keras compiles a loaded model only if it does not override `compile`.
        if name == "loss" and not is_fit_by(self._parallel_mix, value):
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
                stacklevel=4,
            )
        super().__setattr__(name, value)
        if name == "optimizer":  # compiled again: older traces are stale
            self._parallel_unmixed_functions.clear()

    def _parallel_end(self, method: str) -> None:
        if method == "predict" or not isinstance(self._parallel_mix, GaussianMix):
            return
        found = find_of_all_columns(self.metrics) if self.compiled else []
        if found and found != self._parallel_latest.told:
            self._parallel_latest.told = found
            warnings.warn(
                f"Metrics compare the targets with a Gaussian mix's variances too. Received: "
                f"{', '.join(map(repr, found))}. Use `keras_multigpu.layers.GaussianRMSE()`, or a "
                "function of the means, the first half of the columns.",
                stacklevel=4,
            )

    def _parallel_keeps_outputs(self) -> bool:
        if not is_fit_by(self._parallel_mix, self.template.loss):
            return False
        if self._parallel_latest.symbolic_outputs is None:
            return True
        before, after = self.template.outputs, self.outputs
        return [one.shape for one in before] == [one.shape for one in after]

    def _parallel_described_outputs(self) -> list[keras.KerasTensor]:
        """The mix's symbolic outputs, if the template has symbolic outputs."""
        self.template.outputs  # noqa: B018  the template's error where there are none
        return keras.tree.flatten(self._parallel_latest.symbolic_outputs)

    @property
    def output_names(self) -> list[str] | None:
        """The template's names of the outputs, if the mix has the same number."""
        names = getattr(self.template, "output_names", None)
        return names if names and len(names) == len(self.outputs) else None

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's symbolic outputs."""
        self._parallel_runner.lend()
        outputs = self.template.compute_output_spec(*args, **kwargs)
        return self._parallel_mix_outputs([outputs] * len(self.replicas), features_of(args, kwargs))

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The mix's output shapes."""
        shapes = self.template.compute_output_shape(*args, **kwargs)
        return self._parallel_mix.compute_output_shape([shapes] * len(self.replicas))

    def _parallel_mix_outputs(self, outputs: list[Any], features: Any) -> Any:
        return call_mix(self._parallel_mix, outputs, features)

    @property
    def trainable(self) -> bool:
        """Whether the template is trainable, or the mix has trainable weights."""
        return self.template.trainable or bool(self._parallel_mix.trainable_variables)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.template.trainable = value
        if self._parallel_mix is not None:
            self._parallel_mix.trainable = value

    def _parallel_retrace(self) -> None:
        super()._parallel_retrace()
        self._parallel_unmixed_functions.clear()

    def predict_step(self, *args: Any) -> Any:
        """The step of `predict`: the template's own for the mix, Keras's for single replicas."""
        if self._parallel_latest.unmixed is None:
            return self._parallel_inherited("predict_step")(*args)
        return keras.Model.predict_step(self, *args)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        if self._parallel_latest.unmixed:  # in training, which a model's `call` may not know of
            return self._parallel_inherited("stateless_call")(*args, **kwargs)
        return super().stateless_call(*args, **kwargs)

    def predict_replicas(self, x: Any, *, training: bool = False, **kwargs: Any) -> list[Any]:
        """Predicts with every replica separately.

        Args:
            x: as in `predict`.
            training: call the replicas as in training, so that random layers draw; only seeds and
                counters change. Shared replicas differ in nothing else.
            **kwargs: as in `predict`: `batch_size`, `verbose`, `steps`, `callbacks`.

        Returns:
            A list with the result of `predict` of each replica.

        Raises:
            ValueError: if there are no rows.
        """
        arrays = [one for one in keras.tree.flatten(x) if one is not None]
        if not arrays or any(0 in tuple(getattr(one, "shape", ()))[:1] for one in arrays):
            raise ValueError(f"`x` must have at least one row. Received: {shapes(x)}.")
        kept = self.predict_function
        self.predict_function = self._parallel_unmixed_functions.get(training)
        self._parallel_latest.unmixed = training
        try:
            return self.predict(x, **kwargs)
        finally:
            self._parallel_unmixed_functions[training] = self.predict_function
            self.predict_function, self._parallel_latest.unmixed = kept, None

    def disagreement(self, x: Any, *, training: bool = False, **kwargs: Any) -> Any:
        """How much the replicas' outputs differ, sample by sample.

        Args:
            x: as in `predict`.
            training: as in `predict_replicas`.
            **kwargs: as in `predict`.

        Returns:
            Arrays of shape `(rows,)`, in the structure of the outputs: the standard deviation over
            the replicas, as the root mean square over all values of a sample. For outputs that
            are not numbers: the share of values that differ from the first replica's.

        Warns:
            UserWarning: if the replicas can't differ: there is only one, or they are shared and
                have drawn no random numbers.
        """
        outputs = self.predict_replicas(x, training=training, **kwargs)
        spreads = keras.tree.map_structure(spread, *outputs)
        if len(outputs) == 1:
            warn_of_one_replica()
        elif not self._parallel_clones:
            warn_if_zero(spreads, outputs, training)
        return spreads
