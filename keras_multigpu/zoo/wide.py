"""The wide model: a linear or almost linear model of hashed categorical columns.

The model contains its encoder. It is saved with the model, which can therefore hash its own input
when it is served. Where indices come from elsewhere, the encoders' fingerprints are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.arguments import non_negative_integer, positive_integer, positive_integers
from keras_multigpu.layers import MultiHotDense
from keras_multigpu.sparse import HashEncoder
from keras_multigpu.sparse.encoder import copy_encoder
from keras_multigpu.zoo.wide_checks import (
    check_fingerprint,
    check_indices,
    check_labels,
    find_encoder,
)

_MIDDLE_EXPONENT = 0.3
# Adagrad's steps go to the ones of a value together: each gets its share.
_LEARNING_RATE = 0.3
# About the square of the gradient of a value that a batch of 350 rows has once: the first steps of
# rare values are shorter.
_FIRST_SQUARE = 2e-6


@keras.saving.register_keras_serializable(package="keras_multigpu")
class WideModel(keras.Model):
    """A model of the indices that an encoder gives; made by `wide`.

    Args:
        encoder: the encoder, which is copied, or its JSON.
        units: the number of outputs. They are linear; a logistic model's are logits.
        middle: the number of layers with `round(width ** 0.3)` units and ReLU between the
            multi-hot row and the output; 0 for a linear model.
        deep: the units of the layers of a deep part beside the wide one; the outputs of both are
            added (Cheng et al., "Wide & deep learning for recommender systems", 2016). Its first
            layer sums embeddings, one for each index.
        sparse_gradient: as for `keras_multigpu.layers.MultiHotDense`.
        **kwargs: passed to `keras.Model`.

    Input: indices, int32 of shape `(rows, encoder.ones)`, as `encoder.transform(table)` returns.
    Output: a tensor of shape `(rows, units)`.

    Attributes:
        encoder: the model's encoder. Indices must come from an encoder with its fingerprint. It
            is a copy: a later `fit` of the original doesn't change the model.

    Raises:
        ValueError: if an argument is invalid.

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
        encoder = copy_encoder(encoder)
        units, middle = positive_integer("units", units), non_negative_integer("middle", middle)
        hidden = positive_integers("deep", deep)
        reduced = round(encoder.width**_MIDDLE_EXPONENT)
        inputs = keras.Input((encoder.ones,), dtype="int32", name="indices")

        def stack_layers(name: str, hidden: list[int], use_bias: bool) -> Any:
            """Hidden layers and the output."""
            tensor: Any = inputs
            for number, size in enumerate([*hidden, units]):
                is_last = number == len(hidden)
                options: dict[str, Any] = {
                    "name": f"{name}_{number}",
                    "activation": None if is_last else "relu",
                    "use_bias": use_bias or not is_last,
                }
                if number:
                    tensor = keras.layers.Dense(size, **options)(tensor)
                    continue
                if is_last:
                    options["kernel_initializer"] = "zeros"  # unknown values change nothing
                options["sparse_gradient"] = sparse_gradient
                tensor = MultiHotDense(size, encoder.width, **options)(tensor)
            return tensor

        outputs = stack_layers("wide", [reduced] * middle, True)
        if hidden:
            deep_outputs = stack_layers("deep", hidden, False)
            outputs = keras.layers.Add(name="sum")([outputs, deep_outputs])
        super().__init__(inputs, outputs, **{"name": "wide", **kwargs})
        self.encoder = encoder
        self._settings = {
            "units": units,
            "middle": middle,
            "deep": hidden,
            "sparse_gradient": sparse_gradient,
        }

    def predict_table(self, table: Any, **kwargs: Any) -> np.ndarray:
        """Hashes the rows of a table, and predicts them.

        Args:
            table: a table, as for `HashEncoder.transform`.
            **kwargs: passed to `predict`.

        Returns:
            An array of shape `(rows, units)`: with the logistic loss logits, of which
            `keras.ops.sigmoid` makes probabilities.
        """
        return self.predict(self.encoder.transform(table, output="indices"), **kwargs)

    def check_encoder(self, encoder: Any) -> None:
        """Raises a `ValueError` for an encoder, or a dataset's, with another fingerprint."""
        check_fingerprint(self.encoder, encoder.fingerprint)

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as Keras does, on indices of its encoder.

        A `HashedDataset` and its `to_tf_data()` are read in their own order. The encoder of any
        other `tf.data.Dataset` is unknown: make sure that it is this model's.
        """
        self._check_data(x, y)
        other = kwargs.get("validation_data")
        self._check_data(*(other[:2] if isinstance(other, (tuple, list)) else [other]))
        if find_encoder(x):  # the dataset shuffles itself
            kwargs.setdefault("shuffle", False)
        return super().fit(x, y, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model, as Keras does, on indices of its encoder."""
        self._check_data(x, y)
        return super().evaluate(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predicts, as Keras does, from indices of its encoder."""
        check_indices(self.encoder, x)
        return super().predict(x, *args, **kwargs)

    def _check_data(self, x: Any, y: Any = None) -> None:
        check_indices(self.encoder, x)
        if self.loss and find_encoder(x) and getattr(x, "label_range", 0) is None:
            raise ValueError(
                "A model is trained and evaluated on labels. Received: data without labels. Name "
                "their column: `HashedDataset(files, encoder, label=...)`."
            )
        # A logistic loss has no least value for other labels. A generator's are not known.
        if isinstance(self.loss, keras.losses.BinaryCrossentropy):
            check_labels(x, y)

    def get_config(self) -> dict[str, Any]:
        """The arguments, with the encoder as JSON."""
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
        check_fingerprint(self.encoder, np.asarray(store["fingerprint"]).tobytes().decode())


def wide(
    encoder: HashEncoder,
    *,
    units: int = 1,
    middle: int = 0,
    deep: Sequence[int] = (),
    optimizer: Any = None,
    loss: Any = "logistic",
    metrics: Any = None,
    sparse_gradient: bool = False,
    jit_compile: bool | str | None = None,
) -> WideModel:
    """A compiled wide model: hashed columns, by default a logistic model trained by Adagrad.

    With an encoder of the wide layout, the defaults are about as good as logistic regression on
    `FeatureHasher`, and as Vowpal Wabbit. Train until the AUC of other rows falls: one to five
    epochs. The published model is
    `wide(HashEncoder(columns, layout="published"), loss="mse", optimizer="ftrl")`.

    Args:
        encoder: hashes the columns; the model keeps a copy.
        units: the number of outputs.
        middle: the number of layers with `round(width ** 0.3)` units before the output; 0 for a
            linear model.
        deep: the units of the layers of a deep part beside the wide one.
        optimizer: `None`: for a linear model `Adagrad`, whose steps are larger for rare values
            (Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and
            stochastic optimization", 2011), otherwise `Adam(0.002)`; `"ftrl"`: `Ftrl(0.2)` with
            L1 and L2 penalties of 1.0 (McMahan et al., "Ad click prediction: a view from the
            trenches", 2013); `"adam"`: `Adam(0.002)`; or an optimizer for `compile`.
        loss: `"logistic"`, for labels 0 and 1 and outputs that are logits; `"mse"`, for other
            numbers; or a loss for `compile`.
        metrics: as for `compile`.
        sparse_gradient: as for `keras_multigpu.layers.MultiHotDense`.
        jit_compile: as for `compile`; `None` compiles with XLA, which is about twice as fast,
            unless the gradients are sparse.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> encoder = HashEncoder({"city": 1000, "age": 100})
        >>> model = wide(encoder)
        >>> table = {"city": ["Rome", "Paris"], "age": [41, 7]}
        >>> history = model.fit(encoder.transform(table), np.array([[1.0], [0.0]]), verbose=0)
        >>> model.predict_table(table, verbose=0).shape
        (2, 1)
        >>> model.encoder.width, model.count_params()
        (8800, 8801)
    """
    model = WideModel(encoder, units, middle, deep, sparse_gradient)
    if optimizer is None:
        rate = _LEARNING_RATE / model.encoder.layout_.splits
        adagrad = keras.optimizers.Adagrad(rate, initial_accumulator_value=_FIRST_SQUARE)
        optimizer = "adam" if middle or len(deep) else adagrad
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
