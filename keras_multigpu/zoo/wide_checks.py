"""What a wide model's data must be: indices of its encoder, and labels that its loss can use."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_multigpu.sparse import HashEncoder


def encoder_of(data: Any) -> HashEncoder | None:
    """The encoder of data that have one: a `HashedDataset`, its `to_tf_data()`, and others."""
    encoder = getattr(data, "encoder", None)
    return encoder if isinstance(encoder, HashEncoder) else None


def check_fingerprint(found: str, own: str) -> None:
    """Refuses the fingerprint of another encoder."""
    if found != own:
        raise ValueError(
            "The indices must come from the encoder that the model was made with, whose "
            f"fingerprint is {own!r}. Received: fingerprint={found!r}. Use `model.encoder`, or "
            "make and train a model with the other encoder."
        )


def check_indices(data: Any, encoder: HashEncoder) -> None:
    """Refuses data of another encoder, and an array of indices that the row does not have."""
    if found := encoder_of(data):
        check_fingerprint(found.fingerprint, encoder.fingerprint)
    elif isinstance(data, np.ndarray) and data.size:
        least, largest = int(data.min()), int(data.max())
        if least < 0 or largest >= encoder.width:  # XLA would use other ones
            raise ValueError(
                f"Indices must be from 0 to {encoder.width - 1}. Received: indices "
                f"from {least} to {largest}. Use those that "
                "`model.encoder.transform(table)` returns."
            )


def check_labels(data: Any, labels: Any, loss: Any) -> None:
    """Refuses labels outside of 0 to 1 for a logistic loss, which has no least value for them.

    The labels of a dataset or a generator, other than a `HashedDataset`, are not known.
    """
    if not isinstance(loss, keras.losses.BinaryCrossentropy):
        return
    found = getattr(data, "label_range", None)
    if found is None and hasattr(labels, "__array__"):
        array = np.asarray(labels)
        found = (array.min(), array.max()) if array.size and array.dtype.kind in "biuf" else None
    if found is not None and not (found[0] >= 0 and found[1] <= 1):
        raise ValueError(
            "The labels of a logistic model must be from 0 to 1. Received: labels from "
            f"{found[0]:g} to {found[1]:g}. Use 0 and 1 for two classes, and "
            '`wide(..., loss="mse")` for other numbers.'
        )
