"""The wide model: categorical columns, hashed, into a linear or almost linear model.

The encoder belongs to the model. It is saved with it, so that what is served hashes its own
input, and its fingerprint is compared wherever indices come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.layers import MultiHotDense
from keras_multigpu.sparse import HashEncoder
from keras_multigpu.sparse.dataset import copy_encoder

_MIDDLE_EXPONENT = 0.3


@keras.saving.register_keras_serializable(package="keras_multigpu")
class WideModel(keras.Model):
    """A model on the indices that an encoder gives; made by `wide`.

    Args:
        encoder: the encoder, which is copied, or its JSON.
        units: how many outputs there are. They are linear: of a logistic model they are logits.
        middle: how many layers of `round(width ** 0.3)` units, with ReLU, stand between the
            multi-hot row and the output; none for a linear model.
        deep: the units of the layers of a deep part beside the wide one, whose outputs are added
            (Cheng et al., "Wide & deep learning for recommender systems", 2016); its first layer
            is the sum of embeddings, one for each index.
        sparse_gradient: as for `keras_multigpu.layers.MultiHotDense`.
        **kwargs: those of `keras.Model`.

    Input: indices, int32 of shape `(rows, encoder.ones)`: what `encoder.transform(table)` gives.
    Output: a tensor of shape `(rows, units)`.

    Attributes:
        encoder: the model's own encoder: the input must come from one like it. The one that the
            model was made with can be fitted anew, without a change to the model.

    Raises:
        ValueError: if an argument is not of that kind.

    Example:
        >>> encoder = HashEncoder({"city": 1000, "age": 100})
        >>> model = WideModel(encoder, units=2, deep=[8, 4])
        >>> model.predict_table({"city": ["Rome"], "age": [41]}, verbose=0).shape
        (1, 2)
    """

    def __init__(
        self,
        encoder: HashEncoder | str,
        units: int = 1,
        middle: int = 0,
        deep: Sequence[int] = (),
        sparse_gradient: bool = False,
        **kwargs: Any,
    ):
        if isinstance(encoder, str):
            encoder = HashEncoder.from_json(encoder)
        _check(units, middle, deep)
        encoder = copy_encoder(encoder)
        reduced = round(encoder.width**_MIDDLE_EXPONENT)
        inputs = keras.Input((encoder.ones,), dtype="int32", name="indices")

        def part(name: str, hidden: list[int], use_bias: bool) -> Any:
            """Layers of so many units, and the output."""
            tensor: Any = inputs
            sizes = [*hidden, units]
            for number, size in enumerate(sizes):
                is_last = number == len(sizes) - 1
                options: dict[str, Any] = {
                    "name": f"{name}_{number}",
                    "activation": None if is_last else "relu",
                    "use_bias": use_bias or not is_last,
                }
                if number:
                    tensor = keras.layers.Dense(size, **options)(tensor)
                else:
                    options["sparse_gradient"] = sparse_gradient
                    tensor = MultiHotDense(size, encoder.width, **options)(tensor)
            return tensor

        outputs = part("wide", [reduced] * middle, use_bias=True)
        if deep:
            outputs = keras.layers.Add(name="sum")([outputs, part("deep", [*deep], False)])
        super().__init__(inputs, outputs, **{"name": "wide", **kwargs})
        self.encoder = encoder
        self._settings = {
            "units": units,
            "middle": middle,
            "deep": list(deep),
            "sparse_gradient": sparse_gradient,
        }

    def predict_table(self, table: Any, **kwargs: Any) -> np.ndarray:
        """Predicts the rows of a table, which the model hashes itself.

        Args:
            table: as `HashEncoder.transform` takes it.
            **kwargs: those of `predict`.

        Returns:
            An array of shape `(rows, units)`.
        """
        return self.predict(self.encoder.transform(table, output="indices"), **kwargs)

    def check_encoder(self, encoder: Any) -> None:
        """Refuses an encoder that gives other indices than the model's own.

        Args:
            encoder: an encoder, or a dataset that has one.

        Raises:
            ValueError: if its fingerprint is another one.
        """
        _compare(encoder.fingerprint, self.encoder.fingerprint)

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as Keras does, on indices of its own encoder.

        A `HashedDataset`, and its `to_tf_data()`, are read in their own order. Of another
        `tf.data.Dataset` no encoder is known: its indices must be those of this model's encoder.
        """
        self._check_data(x, kwargs.get("validation_data"))
        if _encoder_of(x):  # it shuffles itself
            kwargs.setdefault("shuffle", False)
        return super().fit(x, *args, **kwargs)

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model, as Keras does, on indices of its own encoder."""
        self._check_data(x)
        return super().evaluate(x, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predicts, as Keras does, from indices of its own encoder."""
        self._check_data(x)
        return super().predict(x, *args, **kwargs)

    def _check_data(self, *data: Any) -> None:
        for one in data:
            if encoder := _encoder_of(one):
                self.check_encoder(encoder)
            elif isinstance(one, np.ndarray) and one.size:
                self._check_range(int(one.min()), int(one.max()))

    def _check_range(self, least: int, largest: int) -> None:
        """Refuses what no encoder gives: XLA would take it for another index, and say nothing."""
        if least < 0 or largest >= self.encoder.width:
            raise ValueError(
                f"Indices must be from 0 to {self.encoder.width - 1}. Received: indices from "
                f"{least} to {largest}. Give what `model.encoder.transform(table)` returns."
            )

    def get_config(self) -> dict[str, Any]:
        """The settings, and the encoder as JSON."""
        own = {"encoder": self.encoder.to_json(), **self._settings}
        return {**own, "name": self.name, "dtype": self.dtype_policy.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> WideModel:
        """The model that `get_config` described."""
        return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """Writes the encoder's fingerprint beside the weights."""
        super().save_own_variables(store)
        store["fingerprint"] = np.frombuffer(self.encoder.fingerprint.encode(), "uint8")

    def load_own_variables(self, store: Any) -> None:
        """Compares the encoder's fingerprint with that of the weights.

        Raises:
            ValueError: if the weights were trained on other indices.
        """
        _compare(np.asarray(store["fingerprint"]).tobytes().decode(), self.encoder.fingerprint)


def wide(
    encoder: HashEncoder,
    *,
    units: int = 1,
    middle: int = 0,
    deep: Sequence[int] = (),
    optimizer: Any = "ftrl",
    loss: Any = "mse",
    metrics: Any = None,
    sparse_gradient: bool = False,
    jit_compile: bool | str | None = None,
) -> WideModel:
    """A compiled wide model, as it was published: hashed columns, Ftrl or Adam, MSE or logistic.

    Args:
        encoder: how the columns are hashed; the model keeps a copy.
        units: how many outputs there are.
        middle: how many layers of `round(width ** 0.3)` units stand in between; 0 for a linear
            model.
        deep: the units of the layers of a deep part beside the wide one.
        optimizer: `"ftrl"`: `Ftrl(0.2)` with the L1 and L2 penalties of 1.0 (McMahan et al., "Ad
            click prediction: a view from the trenches", 2013); `"adam"`: `Adam(0.002)`; or
            whatever `compile` takes.
        loss: `"mse"`; `"logistic"`, for labels 0 and 1, of which the outputs are the logits; or
            whatever `compile` takes.
        metrics: as for `compile`.
        sparse_gradient: as for `keras_multigpu.layers.MultiHotDense`.
        jit_compile: as for `compile`; `None` compiles with XLA, which is about twice as fast,
            unless the gradients are sparse.

    Raises:
        ValueError: if an argument is not of that kind.

    Example:
        >>> encoder = HashEncoder({"city": 1000, "age": 100})
        >>> model = wide(encoder, loss="logistic", optimizer="adam")
        >>> table = {"city": ["Rome", "Paris"], "age": [41, 7]}
        >>> history = model.fit(encoder.transform(table), np.array([[1.0], [0.0]]), verbose=0)
        >>> model.predict_table(table, verbose=0).shape
        (2, 1)
        >>> model.encoder.width, model.count_params()
        (168, 169)
    """
    model = WideModel(encoder, units, middle, deep, sparse_gradient)
    if isinstance(optimizer, str) and optimizer == "ftrl":
        optimizer = keras.optimizers.Ftrl(
            0.2, l1_regularization_strength=1.0, l2_regularization_strength=1.0
        )
    elif isinstance(optimizer, str) and optimizer == "adam":
        optimizer = keras.optimizers.Adam(0.002)
    if isinstance(loss, str) and loss == "logistic":
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    jit_compile = not sparse_gradient if jit_compile is None else jit_compile
    model.compile(optimizer, loss, metrics=metrics, jit_compile=jit_compile)
    return model


def _encoder_of(data: Any) -> HashEncoder | None:
    """The encoder of a `HashedDataset`, of its `to_tf_data()`, or of other data that have one."""
    encoder = getattr(data, "encoder", None)
    return encoder if isinstance(encoder, HashEncoder) else None


def _compare(found: str, own: str) -> None:
    if found != own:
        raise ValueError(
            "The indices must come from the encoder that the model was made with, whose "
            f"fingerprint is {own!r}. Received: fingerprint={found!r}. Take `model.encoder`, or "
            "make a model with the other encoder and train it anew."
        )


def _check(units: Any, middle: Any, deep: Any) -> None:
    for name, value, least in (("units", units, 1), ("middle", middle, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"`{name}` must be an integer of {least} or more. Received: {name}={value!r}."
            )
    is_list = isinstance(deep, Sequence) and not isinstance(deep, str)
    if not is_list or not all(type(size) is int and size > 0 for size in deep):
        raise ValueError(
            "`deep` must be a list of positive integers, the units of each layer. "
            f"Received: deep={deep!r}."
        )
