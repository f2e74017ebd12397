"""The tensors that a step takes: which have the rows of a batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Split, Value
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dim


@dataclasses.dataclass
class Argument:
    """A tensor that a step takes.

    Attributes:
        tensor: it.
        dims: its dimensions, with the batch's symbol; `None` if their number isn't known.
        has_rows: whether the first axis is the batch.
        const: of the shape of a sparse tensor, whose rows are the batch's.
        even_dims: of a ragged tensor's splits, if it has as many rows as the batch.
        is_flat: whether it has the values of all rows of a ragged tensor.
    """

    tensor: Any
    dims: Any
    has_rows: bool = False
    const: Any = None
    even_dims: Any = None
    is_flat: bool = False

    @property
    def spec(self) -> tf.TensorSpec:
        """What the step is traced with."""
        shape = self.tensor.shape
        if self.has_rows and isinstance(self.dims[0], Dim):
            shape = [None, *shape[1:]]
        return tf.TensorSpec(shape, self.tensor.dtype)

    def value(self, planner: Planner, are_even: bool) -> Value:
        """What is on the first device; what has rows is split from there.

        `are_even`: whether ragged tensors have as many rows as the batch.
        """
        item, chosen = planner.new_input(self.tensor.dtype), planner.chosen
        has_rows, dims = self.has_rows, self.even_dims if are_even and self.even_dims else self.dims
        if self.is_flat and chosen is not None and not chosen.are_fixed:
            has_rows, dims = True, (planner.new_rows(item), *dims[1:])
        value = planner.value(self.tensor.dtype, dims, WHOLE, item)
        value.layout, value.const = Split(0) if has_rows else WHOLE, self.const
        return value


def rows_of(leaves: Sequence[Any]) -> Any:
    """The number of rows of a batch: an `int`, `"unknown"` until the step runs, or `None`."""
    tensors = [one for one in leaves if tf.is_tensor(one) and one.shape.rank]
    others = [one for one in tensors if not isinstance(one, tf.RaggedTensor)]
    found = [one.shape[0] for one in others or tensors[:1]]
    known = {one for one in found if one is not None}
    if None in found:
        return "unknown"
    return known.pop() if len(known) == 1 else None


def arguments(
    args: Any, leaves: Sequence[Any], batch: Any, have_rows: Sequence[bool] | None, all_rows: bool
) -> tuple[list[Argument], Callable[[Sequence[Any]], Any]]:
    """The tensors of a step's arguments, and a function that puts others in their places.

    Iterators and datasets stay where they are: the step's trace captures them.
    """
    found: list[Argument] = []
    for number, leaf in enumerate(leaves):
        may_have_rows = have_rows is None or have_rows[number]
        if isinstance(leaf, tf.SparseTensor) and may_have_rows:
            dims: Any = (batch, *leaf.shape.as_list()[1:])
            const = constant_of([*dims]) if None not in dims else None
            found += [
                Argument(leaf.indices, (None, len(dims))),
                Argument(leaf.values, (None,)),
                Argument(leaf.dense_shape, (len(dims),), const=const),
            ]
        elif isinstance(leaf, tf.Tensor):
            rank = leaf.shape.rank
            dims = static_dims(leaf)
            is_batch = all_rows or (bool(rank) and dims[0] in (None, batch))
            has_rows = bool(rank) and may_have_rows and is_batch
            found.append(Argument(leaf, (batch, *dims[1:]) if has_rows else dims, has_rows))
        elif tf.is_tensor(leaf):
            is_ragged = isinstance(leaf, tf.RaggedTensor) and may_have_rows
            may_be_even = is_ragged and batch is not None and leaf.shape[0] in (None, batch)
            for one in tf.nest.flatten(leaf, expand_composites=True):
                even_dims = (batch + 1,) if may_be_even and one is leaf.row_splits else None
                is_flat = is_ragged and one is leaf.flat_values and one.shape[0] is None
                found.append(Argument(one, static_dims(one), even_dims=even_dims, is_flat=is_flat))

    def restore(tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)

        def other(leaf: Any) -> Any:
            parts = tf.nest.flatten(leaf, expand_composites=True)
            own = list(itertools.islice(rest, len(parts)))
            return tf.nest.pack_sequence_as(leaf, own, expand_composites=True)

        return tf.nest.map_structure(lambda one: other(one) if tf.is_tensor(one) else one, args)

    return found, restore
