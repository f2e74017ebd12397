"""Which values are missing, in files and tables alike, and the text that stands for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MISSING = "nan"
# Earlier versions: an empty field of a CSV file is missing, an empty text of a table is a text.
EMPTY_FIELDS = "empty fields"


@dataclasses.dataclass(frozen=True)
class Missing:
    """What an encoder takes for a missing value, beside nulls and not-a-number.

    `text` is hashed for a missing value, `values` are the texts that are missing.
    """

    text: str
    values: tuple[str, ...]
    is_empty_field: bool

    @classmethod
    def parse(cls, text: Any, values: Any) -> Missing:
        """The settings `missing` and `missing_values`, checked."""
        if not isinstance(text, str):
            raise ValueError(
                "`missing` must be a string, the text that stands for a missing value. "
                f"Received: missing={text!r}."
            )
        if isinstance(values, str) and values == EMPTY_FIELDS:
            return cls(text, (), is_empty_field=True)
        is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
        if not is_list or not all(isinstance(one, str) for one in values):
            raise ValueError(
                '`missing_values` must be a list of texts, such as ["", "NA"], or '
                f'"{EMPTY_FIELDS}". Received: missing_values={values!r}.'
            )
        return cls(text, tuple(sorted(set(values))), "" in values)

    @property
    def setting(self) -> Any:
        """The setting `missing_values`, written out."""
        is_earlier = self.is_empty_field and not self.values
        return EMPTY_FIELDS if is_earlier else list(self.values)

    def find(self, texts: pa.Array) -> np.ndarray:
        """The places of the texts that are missing, nulls among them."""
        are_missing = pc.is_null(texts)
        for value in self.values:
            are_equal = pc.equal(texts, pa.scalar(value.encode(), texts.type))
            are_missing = pc.or_kleene(are_missing, are_equal)
        return pc.indices_nonzero(are_missing).to_numpy()
