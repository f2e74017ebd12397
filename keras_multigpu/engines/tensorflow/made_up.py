"""Rows made for a model's inputs, on which it can be tried without its data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

_WORDS = ("red", "green", "blue", "a", "0", "42", "the quick fox", "of")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What made-up rows are like.

    Attributes:
        rows: how many.
        axis: the length of axes that are not known.
        high: integers are below it.
        scale: the size of floating-point numbers.
        positive: make no negative ones.
        device: where to compute with them.
    """

    rows: int = 3
    axis: int = 32
    high: int = 8
    scale: float = 1.0
    positive: bool = False
    device: str = "cpu:0"


def make_up(tensor: Any, settings: Settings, rng: np.random.Generator) -> Any:
    """Rows of a tensor's type, all different; of a tensor without rows, one value."""
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
    """Some rows of a made-up tensor; all of one that has no rows."""
    if not tf.is_tensor(value) or not value.shape.rank or value.shape[0] != rows:
        return value
    if isinstance(value, tf.SparseTensor):
        starts = [start] + [0] * (value.shape.rank - 1)
        return tf.sparse.slice(value, starts, [size, *value.shape[1:]])
    return value[start : start + size]


def perturb(value: Any, rng: np.random.Generator) -> Any:
    """A weight near another one, but not zero: what is zero at first shows nothing."""
    if not value.dtype.is_floating:
        return value
    factor = tf.cast(rng.uniform(0.6, 1.4, value.shape), value.dtype)
    return value * factor + tf.cast(rng.uniform(0.01, 0.1, value.shape), value.dtype)


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
    if len(shape) == 3 and not settings.positive:  # time steps that a `Masking` layer leaves out
        numbers = _with_holes(numbers, rng)
    return tf.cast(numbers, dtype)


def _with_holes(numbers: Any, rng: np.random.Generator) -> Any:
    """Zeros at the end of some rows, which layers may take for padding.

    The first rows differ decidedly: none, nearly all, and about half of the row.
    """
    if numbers.ndim > 1 and numbers.shape[1] > 1:
        length = numbers.shape[1]
        kept = [length, 1, (length + 1) // 2, *rng.integers(1, length + 1, len(numbers))]
        for row, count in zip(numbers, kept):
            row[count:] = 0
    return numbers


def _lengths(count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of rows; one of the first part of them is longer than all the others."""
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
