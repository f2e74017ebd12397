"""What both engines say of batches of which each process gives its part."""

from __future__ import annotations

from typing import Any

NO_WHOLE_NUMBER = (
    "Where each process gives its part of a batch, `predict` returns the outputs of its rows: an "
    "output must have a whole number of rows for each row of the batch."
)


def check_has_rows(output: Any) -> None:
    """Raises a `ValueError` for an output without rows."""
    if not len(output.shape):
        raise ValueError(
            f"{NO_WHOLE_NUMBER} Received: an output of shape (), without rows. Return one value "
            "per row, or join with `data='same'`."
        )
