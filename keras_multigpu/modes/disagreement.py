"""The replicas of a mixed model one by one, and how much their outputs differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.layers.outputs import shapes
from keras_multigpu.modes.mixed import MixedModel

_ROUNDING = 1e-6  # of the largest output: devices may round differently


class UnmixedModel(MixedModel):
    """A mixed model that can show what each replica predicts."""

    # `None` for the mix; while single replicas predict, the `training` argument of their calls.
    _parallel_unmixed: bool | None = None
    _parallel_unmixed_functions: dict[bool, Any]

    def _parallel_retrace(self) -> None:
        super()._parallel_retrace()
        self._parallel_unmixed_functions.clear()

    def _parallel_on_compiling(self, name: str, value: Any) -> None:
        super()._parallel_on_compiling(name, value)
        if name == "optimizer":  # compiled again: older traces are stale
            self._parallel_unmixed_functions.clear()

    def predict_step(self, *args: Any) -> Any:
        """The step of `predict`: the template's own for the mix, Keras's for single replicas."""
        if self._parallel_unmixed is None:
            return self._parallel_inherited("predict_step")(*args)
        return keras.Model.predict_step(self, *args)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        if self._parallel_unmixed:  # in training, which a model's `call` may not know of
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
        self._parallel_unmixed = training
        try:
            return self.predict(x, **kwargs)
        finally:
            self._parallel_unmixed_functions[training] = self.predict_function
            self.predict_function, self._parallel_unmixed = kept, None

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
        spreads = keras.tree.map_structure(_spread, *outputs)
        if len(outputs) == 1:
            _warn_of_one_replica()
        elif not self._parallel_clones:
            _warn_if_zero(spreads, outputs, training)
        return spreads


def _spread(*parts: np.ndarray) -> np.ndarray:
    """The spread of one output, an array of each replica: a number for each row.

    The standard deviation, or for values that are not numbers the share that differs.
    """
    if not _are_numbers(parts[0]):
        differs = np.stack(parts) != parts[0]
        return differs.mean(axis=0).reshape(len(parts[0]), -1).mean(axis=1)
    variance = np.var(np.stack(parts).astype("float64"), axis=0)
    return np.sqrt(variance.reshape(len(variance), -1).mean(axis=1))


def _warn_of_one_replica() -> None:
    """Warns that a single replica can't disagree."""
    warnings.warn(
        "The disagreement of a single replica is zero by construction: there is no other one. "
        "Received: 1 replica. Give `make_parallel` more devices, or `num_replicas`: several "
        "replicas can be on one device.",
        stacklevel=3,
    )


def _warn_if_zero(spreads: Any, outputs: Sequence[Any], training: bool) -> None:
    """Warns if shared replicas do not differ: they can't, unless they draw random numbers."""
    pairs = zip(keras.tree.flatten(spreads), keras.tree.flatten(outputs[0]))
    if all(one.max(initial=0.0) <= _least(output) for one, output in pairs):
        warnings.warn(
            "The disagreement of shared replicas that draw no random numbers is zero by "
            "construction: they have the same weights. Received: "
            f"replicas='shared', training={training}. Use `training=True` with a model that has "
            "random layers, such as `Dropout`, or make a committee with "
            "`replicas='independent'`.",
            stacklevel=3,
        )


def _least(output: np.ndarray) -> float:
    return _ROUNDING * float(np.abs(output).max(initial=0)) if _are_numbers(output) else 0.0


def _are_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind in "biufc"
