"""Layers that slice and merge batches along the first axis of every tensor."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import positive_integer, short
from keras_multigpu.engines import count_rows, with_attributes


def slice_bounds(rows: Any, index: int, num_slices: int) -> tuple[Any, Any]:
    """The first row of slice `index`, and its number of rows.

    Sizes differ by one row at most, and longer slices come first. A slice beyond the last row is
    empty. `rows` is an integer or a scalar tensor.
    """
    least, extra = rows // num_slices, rows % num_slices
    start = index * least + _smaller(index, extra)
    return start, least + _smaller(1, _larger(extra - index, 0))


@keras.saving.register_keras_serializable(package="keras_multigpu")
class BatchSlice(keras.Layer):
    """Cuts a batch into slices whose lengths differ by one row at most.

    If a batch has fewer rows than slices, each slice beyond the last row gets a copy of that row,
    so no slice is empty. `BatchMerge` removes the copies.

    Args:
        num_slices: the number of slices, 1 or more.
        **kwargs: those of `keras.Layer`.

    Input: a tensor (dense, sparse or ragged) of shape `(rows, ...)`, or a structure of tensors
        with the same number of rows. Scalars go into every slice unchanged.
    Output: a list of `num_slices` structures like the input.

    Raises:
        ValueError: if `num_slices` is not a positive integer, or the inputs have no rows.

    Example:
        >>> import numpy as np
        >>> slices = BatchSlice(2)(np.array([[1.0], [2.0], [3.0]]))
        >>> [tuple(part.shape) for part in slices]
        [(2, 1), (1, 1)]
    """

    def __init__(self, num_slices: int, **kwargs: Any):
        super().__init__(**{"autocast": False, **kwargs})
        self.num_slices = positive_integer("num_slices", num_slices)
        self.supports_masking = True

    def call(self, inputs: Any) -> list[Any]:
        rows = batch_rows(inputs)
        return [
            keras.tree.map_structure(lambda part, i=index: self._slice(part, rows, i), inputs)
            for index in range(self.num_slices)
        ]

    def _slice(self, tensor: Any, rows: Any, index: int) -> Any:
        if tensor is None or not len(tensor.shape):
            return tensor
        start, size = slice_bounds(rows, index, self.num_slices)
        start = _larger(_smaller(start, rows - 1), 0)  # a copy of the last row if the size is 0
        size = _larger(size, _smaller(rows, 1))
        take_rows = engines.current().take_rows
        return with_attributes(lambda part: take_rows(part, start, size), tensor)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """`call` gives each output its mask."""

    def compute_output_spec(self, inputs: Any) -> list[Any]:
        return [keras.tree.map_structure(_any_rows, inputs) for _ in range(self.num_slices)]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_slices": self.num_slices}


@keras.saving.register_keras_serializable(package="keras_multigpu")
class BatchMerge(keras.Layer):
    """Joins the slices of a batch in order, with their Keras masks.

    Args:
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure of tensors per slice, each of shape `(rows, ...)`; and
        `whole`, the batch that `BatchSlice` cut, which tells how many slices are copies of its
        last row. Copies are removed. Without `whole` all slices are kept.
    Output: one structure of tensors of shape `(sum of rows, ...)`.

    Raises:
        ValueError: if a tensor has no batch axis.

    Example:
        >>> import numpy as np
        >>> whole = np.array([[1.0], [2.0]])
        >>> slices = BatchSlice(4)(whole)
        >>> len(slices), BatchMerge()(slices, whole=whole).shape[0]
        (4, 2)
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**{"autocast": False, **kwargs})
        self.supports_masking = True

    def call(self, inputs: list[Any], whole: Any = None) -> Any:
        if not isinstance(inputs, (list, tuple)):
            raise ValueError(
                "`BatchMerge` must have a list of slices, as `BatchSlice` returns. Received: "
                f"{short(inputs)}. Put it into a list: `[inputs]`."
            )
        rows = None if whole is None else batch_rows(whole)

        def merge(*parts: Any) -> Any:
            if parts[0] is None:
                return None
            if not len(parts[0].shape):
                raise ValueError(
                    "Every output of a model whose batch is sliced must have a batch axis, the "
                    f"axis along which the slices are merged. Received: output={parts[0]}, a "
                    "scalar. Return one value per row (for a loss, use `add_loss`)."
                )
            return with_attributes(lambda *values: self._merge(values, rows), *parts)

        return keras.tree.map_structure(merge, *inputs)

    def _merge(self, parts: Any, rows: Any) -> Any:
        engine = engines.current()
        kept = [parts[0]]
        for index, part in enumerate(parts[1:], start=1):
            if rows is not None:
                # All of the slice's rows, or none: an output may have several rows per input.
                is_real = _smaller(1, _larger(rows - index, 0))
                # Copies are cut to no rows, not dropped: their replicas take part in exchanges.
                if not (isinstance(is_real, int) and is_real):
                    part = engine.take_rows(part, 0, count_rows(part) * is_real)
            kept.append(part)
        return engine.join_rows(kept)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """`call` gives each output its mask."""

    def compute_output_spec(self, inputs: list[Any], whole: Any = None) -> Any:
        return keras.tree.map_structure(_any_rows, inputs[0])


def batch_rows(structure: Any) -> Any:
    """The common row count of a structure's tensors: an integer if known, else a scalar tensor."""
    tensors = [part for part in keras.tree.flatten(structure) if len(getattr(part, "shape", ()))]
    if not tensors:
        raise ValueError(
            f"Expected at least one tensor with a batch axis. Received: inputs={structure}."
        )
    counts = [count_rows(tensor) for tensor in tensors]
    known = [count for count in counts if isinstance(count, int)]
    if len(set(known)) > 1:
        raise ValueError(
            "All tensors must have the same number of rows, the length of their first axis. "
            f"Received: tensors of {', '.join(map(str, known))} rows."
        )
    return known[0] if len(known) == len(counts) else engines.current().check_equal(counts)


def _any_rows(tensor: Any) -> keras.KerasTensor:
    """A symbolic tensor like this one, of any number of rows."""
    return keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype, tensor.sparse)


def _smaller(first: Any, second: Any) -> Any:
    both_known = isinstance(first, int) and isinstance(second, int)
    return min(first, second) if both_known else keras.ops.minimum(first, second)


def _larger(first: Any, second: Any) -> Any:
    both_known = isinstance(first, int) and isinstance(second, int)
    return max(first, second) if both_known else keras.ops.maximum(first, second)
