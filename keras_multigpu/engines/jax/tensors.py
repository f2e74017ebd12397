"""Rows of JAX's tensors, dense and sparse."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import sparse

from keras_multigpu.engines.values import Tensor


def take_rows(tensor: Tensor, start: int, size: int) -> Tensor:
    """Rows `start` to `start + size`."""
    if isinstance(tensor, sparse.BCOO):
        begin = (start, *(0 for _ in tensor.shape[1:]))
        end = (start + size, *tensor.shape[1:])
        return sparse.bcoo_slice(tensor, start_indices=begin, limit_indices=end)
    return tensor[start : start + size]


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other along their first axis."""
    if isinstance(tensors[0], sparse.BCOO):
        return sparse.bcoo_concatenate(tensors, dimension=0)
    return jax.numpy.concatenate(tensors, axis=0)
