"""Losses of a whole batch, in place of those that its replicas computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras


def add_losses(layer: keras.Layer, losses: Iterable[Any]) -> None:
    """Adds losses to a parallel model, or to a layer that a step calls in parallel."""
    for loss in losses:
        # Not `layer.add_loss`: a functional model has it for symbolic losses only.
        keras.Layer.add_loss(layer, loss)
    # Keras identifies a loss by its `id`. A replica's loss, freed by now, may have had the same
    # `id`; then the loss would also count as that of an inner layer, and so twice.
    for inner in layer._flatten_layers(include_self=False):
        inner._loss_ids.difference_update(layer._loss_ids)
