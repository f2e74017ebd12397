"""Settings of the process, and batches, with which a parallel model can't work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.templates import metrics_variables


def check_no_strategy(model: keras.Model) -> None:
    """Refuses the scope of a strategy of TensorFlow's, and a model that was made in one.

    Raises:
        ValueError: if there is one.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *metrics_variables(model)]
    variables += optimizer.variables if optimizer is not None else []
    made = [one for one in variables if isinstance(one._value, tf.distribute.DistributedValues)]
    if made:
        received = f"the variable {made[0].path!r}, which was made in `strategy.scope()`"
    elif tf.distribute.has_strategy():
        received = f"`strategy.scope()` of a {type(tf.distribute.get_strategy()).__name__}"
    else:
        return
    raise ValueError(
        "A parallel model puts its weights and batches on the devices itself, and a strategy of "
        f"TensorFlow's would do so too. Received: {received}. Remove the scope: build and compile "
        "the model outside of it, and call `make_parallel` and `fit` without it."
    )


def check_not_distributed(leaves: Iterable[Any]) -> None:
    """Refuses batches that a strategy of TensorFlow's has put on devices.

    Raises:
        ValueError: if there is one.
    """
    if any(isinstance(one, tf.distribute.DistributedValues) for one in leaves):
        raise ValueError(
            "A parallel model puts the rows of a batch on its devices itself. Received: a batch "
            "of a distributed dataset. Give the `tf.data.Dataset` as it is, without "
            "`strategy.experimental_distribute_dataset`."
        )
