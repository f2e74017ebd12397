"""Has `keras.remat` compute a replica's functions again with the replica's weights.

TensorFlow's `recompute_grad` calls a function once more when the gradient is taken, after the scope
that has the weights is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import active_scope
from keras_multigpu.engines.tensorflow.places import RECOMPUTED
from keras_multigpu.engines.tensorflow.scope import AgainScope, ReplicaScope

_recompute_grad = tf.recompute_grad


def recompute_grad(function: Callable[..., Any]) -> Any:
    """TensorFlow's `recompute_grad`; in a replica, with the replica's weights."""
    plain = _recompute_grad(function)

    @functools.wraps(function, updated=())
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        scope = active_scope()
        if not isinstance(scope, ReplicaScope):
            return plain(*args, **kwargs)
        before, calls = AgainScope(scope), list[None]()

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            if len(calls) == 1:
                return function(*args, **kwargs)
            with AgainScope(before):
                return function(*args, **kwargs)

        with tf.name_scope(RECOMPUTED):
            return _recompute_grad(first_or_again)(*args, **kwargs)

    return recomputed


def install() -> None:
    """Puts ours where Keras looks it up, in each call of `keras.remat`."""
    tf.recompute_grad = recompute_grad
