"""The effect of rounding alone on a training: the same training, disturbed in its last digits.

If plain Keras differs from itself this way, a difference proves nothing. There are four ways:
weights and data are changed in their last digits, or outputs are (where a softmax saturates,
weights and data don't change its last digit), or sums over a batch are reordered, or losses and
gradients are multiplied by 3 and divided by it again: gradients of a saturated softmax are
differences of almost equal numbers, whose rounding depends on their size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from . import compare
from .case import Case

_BY = {"float64": 1e-14, "float32": 1e-6}


def disturb(structure: Any, seed: int) -> Any:
    """Arrays of floats, changed in their last digits."""
    rng = np.random.default_rng(seed)
    by = _BY[keras.config.floatx()]

    def change(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        return value * (1 + by * rng.choice([-1.0, 1.0], size=value.shape))

    return keras.tree.map_structure(change, structure)


def disturb_outputs(model: keras.Model, seed: int) -> None:
    """Has a model's losses and metrics see its outputs changed in their last digit."""
    original, rng = model.compute_loss, np.random.default_rng(seed)
    by = np.finfo(keras.config.floatx()).eps

    def change(output: Any) -> Any:
        factors = 1 + by * rng.choice([-1.0, 1.0], size=output.shape[-1:])
        changed = output * keras.ops.cast(factors, output.dtype)
        for name in ("_keras_mask", "_keras_logits"):
            value = getattr(output, name, None)
            if value is not None:
                is_mask = name == "_keras_mask"
                setattr(changed, name, value if is_mask else value * (1 + by))
        return changed

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        y_pred = keras.tree.map_structure(change, y_pred)
        return original(x, y, y_pred, sample_weight, training=training)

    model.compute_loss = compute_loss


@contextlib.contextmanager
def replaced(names: dict[str, Any], **values: Any) -> Iterator[None]:
    """Scope in which some names in a case's text have other values."""
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)


def turned(case: Case, structure: Any) -> Any:
    """The rows of each batch in reverse order."""
    order = np.concatenate(
        [
            np.arange(start, min(start + case.batch, case.rows))[::-1]
            for start in range(0, case.rows, case.batch)
        ]
    )

    def turn(rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            return rows[order]
        return keras.ops.take(rows, order, axis=0)  # texts, which NumPy has as objects

    return keras.tree.map_structure(turn, structure)


def turns(case: Case, names: dict[str, Any]) -> bool:
    """Whether the model ignores the order of a batch's rows: rows are independent."""
    first, second = names["build"](), names["build"]()
    try:
        x = keras.tree.map_structure(lambda rows: np.asarray(rows)[: case.batch], names["X"])
        first(x, training=True)
        second(x, training=True)
        second.set_weights(first.get_weights())
        opposite = keras.tree.map_structure(lambda rows: rows[::-1], x)
        one, other = first(x, training=True), second(opposite, training=True)
        back = keras.tree.map_structure(lambda rows: np.asarray(rows)[::-1], other)
        results = [
            {
                "outputs": keras.tree.map_structure(np.asarray, out),
                "losses": [np.asarray(loss) for loss in model.losses],
                "states": [np.asarray(state) for state in model.non_trainable_weights],
            }
            for model, out in ((first, one), (second, back))
        ]
    except Exception:  # inputs that are no arrays, or that the model takes only in `fit`
        return False
    return not compare.gaps(*results)
