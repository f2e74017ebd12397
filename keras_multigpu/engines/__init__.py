"""The only packages that know a backend: one engine each, one contract for all.

Keras is imported here first, so that the error for a missing backend names the extra to install.
"""

from __future__ import annotations

import functools

from keras_multigpu.extras import SUPPORTED, explain_missing

try:
    import keras
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow", "jax", "torch", "openvino"):
        raise
    raise ImportError(explain_missing(error.name)) from error
except ValueError as error:  # a backend that Keras has not
    raise ImportError(SUPPORTED.format(received=error)) from error

from keras_multigpu.engines.attributes import with_attributes
from keras_multigpu.engines.base import Engine
from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.runners import DataRunner, ModelRunner, Runner, TowerRunner
from keras_multigpu.engines.shared import (
    LARGE_BATCH,
    SEED,
    SEED_STEP,
    active_scope,
    are_given,
    batches_as_in_fit,
    check_alike,
    count_rows,
    is_array,
    is_training,
    reason_of,
)
from keras_multigpu.engines.templates import all_layers, is_built, metrics_of, own_steps, state_read
from keras_multigpu.engines.values import Holding, Request, Result, Transfer


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
    raise RuntimeError(SUPPORTED.format(received=f"keras.backend.backend()={backend!r}"))
