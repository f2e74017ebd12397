"""What a wide model is given: indices of its own encoder, and labels that suit its loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_multigpu.sparse import HashEncoder
from keras_multigpu.sparse.tables import find_names, is_table


def find_encoder(data: Any) -> HashEncoder | None:
    """The encoder of data that have one: a `HashedDataset`, its `to_tf_data()`, and others."""
    encoder = getattr(data, "encoder", None)
    return encoder if isinstance(encoder, HashEncoder) else None


def check_indices(encoder: HashEncoder, data: Any) -> None:
    """Refuses data of another encoder, and an array of indices that the row does not have."""
    if is_table(data) and encoder.cardinalities_.keys() <= {*find_names(data)}:
        raise ValueError(
            f"A wide model takes indices. Received: a table ({type(data).__name__}). Hash its "
            "rows: `model.encoder.transform(table)`; to predict, use "
            "`model.predict_table(table)`."
        )
    if other := find_encoder(data):
        check_fingerprint(encoder, other.fingerprint)
    elif isinstance(data, np.ndarray) and data.size:
        if data.dtype.kind not in "iuf":
            raise ValueError(
                f"Indices must be integers. Received: an array of dtype {data.dtype}. Use "
                "what `model.encoder.transform(table)` returns."
            )
        least, largest = int(data.min()), int(data.max())
        if least < 0 or largest >= encoder.width:  # XLA would use other ones
            raise ValueError(
                f"Indices must be from 0 to {encoder.width - 1}. Received: indices "
                f"from {least} to {largest}. Use those that "
                "`model.encoder.transform(table)` returns."
            )


def check_fingerprint(encoder: HashEncoder, found: str) -> None:
    """Refuses the fingerprint of another encoder."""
    if found != encoder.fingerprint:
        raise ValueError(
            "The indices must come from the encoder that the model was made with, whose "
            f"fingerprint is {encoder.fingerprint!r}. Received: fingerprint={found!r}. "
            "Use `model.encoder`, or make and train a model with the other encoder. Encoders "
            'of earlier versions have `missing_values="empty fields"`.'
        )


def check_labels(data: Any, labels: Any) -> None:
    """Refuses labels outside of 0 to 1, as far as they are known."""
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
