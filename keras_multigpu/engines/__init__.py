"""The only packages that know a backend: one engine each, one contract for all.

Keras is imported here first, so that the error for a missing backend names the extra to install.
"""

from __future__ import annotations

import functools

from keras_multigpu.extras import how_to_install

try:
    import keras
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow", "jax", "torch"):
        raise
    raise ImportError(
        f"keras_multigpu needs Keras 3 with a backend, and `{error.name}` is not installed. "
        "Install a backend with the extra `tensorflow` or `jax-cuda` (NVIDIA GPUs), or "
        f"`tensorflow-cpu` or `jax` (no GPU): {how_to_install('tensorflow')}. With JAX, set the "
        "environment variable KERAS_BACKEND=jax: Keras takes TensorFlow otherwise."
    ) from error

from keras_multigpu.engines.attributes import set_attributes, with_attributes
from keras_multigpu.engines.base import Engine
from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.kinds import MEAN, ROWS, SAME, combine
from keras_multigpu.engines.runners import (
    DataRunner,
    ModelRunner,
    PlacingRunner,
    Runner,
    TowerRunner,
)
from keras_multigpu.engines.shared import (
    SEED,
    SEED_STEP,
    check_alike,
    count_rows,
    is_array,
    is_training,
    split_tensors,
    value_of,
)
from keras_multigpu.engines.structures import take_apart
from keras_multigpu.engines.templates import all_layers, own_steps
from keras_multigpu.engines.values import Holding, Kept, Plan, Request, Result, Transfer

__all__ = [
    "MEAN",
    "ROWS",
    "SAME",
    "SEED",
    "SEED_STEP",
    "Address",
    "ClusterError",
    "DataRunner",
    "Engine",
    "Holding",
    "Kept",
    "ModelRunner",
    "PlacingRunner",
    "Plan",
    "Request",
    "Result",
    "Runner",
    "TowerRunner",
    "Transfer",
    "all_layers",
    "check_alike",
    "combine",
    "count_rows",
    "current",
    "is_array",
    "is_training",
    "own_steps",
    "set_attributes",
    "split_tensors",
    "take_apart",
    "value_of",
    "with_attributes",
]


def current() -> Engine:
    """The engine of the Keras backend in use.

    Raises:
        RuntimeError: if there is no engine for the backend.
    """
    return _engine(keras.backend.backend())


@functools.cache
def _engine(backend: str) -> Engine:
    if backend == "tensorflow":
        from keras_multigpu.engines.tensorflow import TensorFlowEngine

        return TensorFlowEngine()
    if backend == "jax":
        from keras_multigpu.engines.jax import JaxEngine

        return JaxEngine()
    raise RuntimeError(
        "keras_multigpu works on the Keras backends 'tensorflow' and 'jax'. "
        f"Received: keras.backend.backend()={backend!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax before Keras is imported, and restart the "
        "process or kernel."
    )
