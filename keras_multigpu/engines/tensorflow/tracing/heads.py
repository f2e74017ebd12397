"""The softmax or sigmoid that ends an output.

In a graph, Keras's classification losses take the logits from the operation that made the output.
So replicas return logits, and the merged output ends in the operation again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.attributes import get_attributes, set_attributes
from keras_multigpu.engines.values import Tensor

_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


def take_off_activations(outputs: Sequence[Any]) -> tuple[list[Any], list[str | None]]:
    """The outputs without such an end, and the type of each one's: `None` if it has none."""
    ends = [_find_end(output) for output in outputs]
    bare = [end.inputs[0] if end else output for output, end in zip(outputs, ends)]
    return bare, [end and end.type for end in ends]


def apply_activations(outputs: Sequence[Any], types: Sequence[str | None]) -> list[Any]:
    """Undoes `take_off_activations`, and keeps Keras's attributes; further outputs stay."""
    return [
        set_attributes(_ACTIVATIONS[one](output), get_attributes(output)) if one else output
        for output, one in itertools.zip_longest(outputs, types)
    ]


def _find_end(output: Tensor) -> Any:
    """The operation that ends an output, unless Keras has the output's logits already."""
    if not isinstance(output, tf.Tensor) or tf.executing_eagerly():
        return None
    is_activation = output.op.type in _ACTIVATIONS
    return output.op if is_activation and "logits" not in get_attributes(output) else None
