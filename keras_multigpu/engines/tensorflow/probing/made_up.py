"""Made-up input rows, to try a model without its data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

_WORDS = ("red", "green", "blue", "a", "0", "42", "the quick fox", "of")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of made-up rows.

    Attributes:
        rows: the number of rows.
        axis: the length of unknown axes.
        high: integers are below this.
        scale: the size of floating-point numbers.
        growth: by how much they are larger in the second half of the rows.
        positive: make no negative numbers.
        device: where to compute.
    """

    rows: int = 3
    axis: int = 32
    high: int = 8
    scale: float = 1.0
    growth: float = 1.0
    positive: bool = False
    device: str = "cpu:0"


def make_up(tensor: Any, settings: Settings, rng: np.random.Generator) -> Any:
    """Makes different rows of a tensor's type; one value if it has no rows."""
    shape = [settings.axis if axis is None else axis for axis in _shape(tensor)]
    shape[:1] = [settings.rows] * len(shape[:1])
    if isinstance(tensor, tf.SparseTensor):
        values = _values(tensor.dtype, shape, settings, rng)
        keep = rng.random(shape) < 0.5 if tensor.dtype != tf.string else np.ones(shape, bool)
        return tf.sparse.from_dense(tf.where(keep, values, tf.zeros_like(values)))
    if isinstance(tensor, tf.RaggedTensor):
        return _ragged(tensor, shape, settings, rng)
    return _values(tensor.dtype, shape, settings, rng)


def take_part(value: Any, start: int, size: int, rows: int) -> Any:
    """Some rows of a made-up tensor; returns values without rows unchanged."""
    if not tf.is_tensor(value) or not value.shape.rank or value.shape[0] != rows:
        return value
    if isinstance(value, tf.SparseTensor):
        starts = [start] + [0] * (value.shape.rank - 1)
        return tf.sparse.slice(value, starts, [size, *value.shape[1:]])
    return value[start : start + size]


def perturb(value: Any, rng: np.random.Generator) -> Any:
    """Changes a weight a little.

    Zeros, which would hide what they do, and values that are all equal also get something added.
    Random values don't: the numbers of a deep model would grow from layer to layer.
    """
    if not value.dtype.is_floating:
        return value
    changed = value * tf.cast(rng.uniform(0.6, 1.4, value.shape), value.dtype)
    added = tf.cast(rng.uniform(0.01, 0.1, value.shape), value.dtype)
    are_equal = tf.reduce_min(value) >= tf.reduce_max(value)
    return tf.where((value == 0) | are_equal, changed + added, changed)


def _shape(tensor: Any) -> list[int | None]:
    if tensor.shape.rank is None:
        raise ValueError("the number of a tensor's axes is not known")
    return tensor.shape.as_list()


def _values(
    dtype: tf.DType, shape: list[int], settings: Settings, rng: np.random.Generator
) -> tf.Tensor:
    if dtype == tf.string:
        words = [" ".join(rng.choice(_WORDS, size=n)) for n in _lengths(_size(shape), 7, rng)]
        return tf.constant(np.array(words, object).reshape(shape))
    if dtype == tf.bool:
        return tf.constant(rng.random(shape) < 0.7)
    if dtype.is_integer:
        integers = rng.integers(min(1, settings.high - 1), settings.high, shape)
        return tf.cast(_with_holes(integers, rng), dtype)
    numbers = rng.normal(size=shape) * settings.scale
    numbers = np.abs(numbers) + 0.05 * settings.scale if settings.positive else numbers
    if shape and settings.growth != 1.0:
        numbers[shape[0] - shape[0] // 2 :] *= settings.growth
    if len(shape) == 3 and not settings.positive:  # zero time steps, for `Masking` layers
        numbers = _with_holes(numbers, rng)
    return tf.cast(numbers, dtype)


def _with_holes(numbers: Any, rng: np.random.Generator) -> Any:
    """Ends rows with zeros, like padding: the first three by none, all but one, and about half."""
    if numbers.ndim > 1 and numbers.shape[1] > 1:
        length = numbers.shape[1]
        kept = [length, 1, (length + 1) // 2, *rng.integers(1, length + 1, len(numbers))]
        for row, count in zip(numbers, kept):
            row[count:] = 0
    return numbers


def _lengths(count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Random row lengths; the longest is in the first part of the rows."""
    lengths = rng.integers(1, longest - 1, count)
    lengths[min(1, count - 1)] = longest
    return lengths


def _ragged(
    tensor: tf.RaggedTensor, shape: list[int], settings: Settings, rng: np.random.Generator
) -> tf.RaggedTensor:
    lengths = []
    count = settings.rows
    for _ in range(tensor.ragged_rank):
        lengths.append(_lengths(count, 6, rng))
        count = int(lengths[-1].sum())
    flat = _values(tensor.dtype, [count, *shape[tensor.ragged_rank + 1 :]], settings, rng)
    dtype = tensor.row_splits.dtype
    return tf.RaggedTensor.from_nested_row_lengths(flat, [tf.cast(n, dtype) for n in lengths])


def _size(shape: list[int]) -> int:
    return int(np.prod(shape, dtype=int))
