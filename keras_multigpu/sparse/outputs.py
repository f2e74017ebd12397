"""The forms in which multi-hot rows are given."""

from __future__ import annotations

from typing import Any

import numpy as np

OUTPUTS = ("indices", "csr", "dense")


def check(output: Any) -> None:
    """Refuses what is none of the forms.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(output, str) or output not in OUTPUTS:
        raise ValueError(
            f'`output` must be "indices", "csr" or "dense". Received: output={output!r}.'
        )


def make(output: str, indices: np.ndarray, width: int) -> Any:
    """Multi-hot rows in one of the forms.

    Args:
        output: which form.
        indices: where the ones are, int32 of shape `(rows, ones)`, rising in each row.
        width: the columns of a multi-hot row.

    Example:
        >>> import numpy as np
        >>> make("dense", np.array([[0, 2], [1, 2]]), 3)
        array([[1., 0., 1.],
               [0., 1., 1.]], dtype=float32)
    """
    if output == "indices":
        return indices
    rows, ones = indices.shape
    if output == "dense":
        dense = np.zeros((rows, width), "float32")
        np.put_along_axis(dense, indices, 1.0, axis=1)
        return dense
    from scipy.sparse import csr_matrix

    bounds = np.arange(rows + 1) * ones
    values = np.ones(indices.size, "float32")
    return csr_matrix((values, indices.ravel(), bounds), shape=(rows, width))
