"""The models whose memory is measured, with batches that need tens of megabytes at least."""

from __future__ import annotations

import dataclasses

from benchmarks.models import DEEPCONN, MODELS, Benchmark
from benchmarks.prediction_models import CHOSEN

_ROWS = {"narrow": 8192, "autoencoder": 2048, "transformer": 256, "text_cnn": 512}
NAMES = (*MODELS, "text_cnn", "autoencoder", "narrow", "deepconn")


def find(name: str) -> Benchmark:
    """A model by its name, with its batch."""
    found = {"deepconn": DEEPCONN, **MODELS, **CHOSEN}[name]
    return dataclasses.replace(found, batch_size=_ROWS.get(name, found.batch_size))
