"""The hash code of a value, and where in the multi-hot row the codes of all columns are.

A column of a table occupies `splits` groups of equal width in the multi-hot row; `widths` says how
wide they are. The xxh64 hash of the value's text (UTF-8, seed 0) is written as sixteen hexadecimal
digits and cut into as many groups of digits. Each group of digits, modulo the width, is the
position of the one in its group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.sparse.widths import HASH_BITS

RECIPE = "xxh64 of UTF-8, seed 0, groups of hexadecimal digits"


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of a column: `splits` groups of `group` indices each, from index `start` on.

    Example:
        >>> import numpy as np, xxhash
        >>> hashes = np.array([xxhash.xxh64_intdigest(b"Rome")], dtype="uint64")
        >>> f"{hashes[0]:016x}"
        'f56804e558b0db3c'
        >>> Code(start=0, group=8, splits=4).indices(hashes)
        array([[ 0, 13, 16, 28]], dtype=int32)
        >>> [int("f56804e558b0db3c"[4 * i :][:4], 16) % 8 + 8 * i for i in range(4)]
        [0, 13, 16, 28]
    """

    start: int
    group: int
    splits: int

    def indices(self, hashes: np.ndarray) -> np.ndarray:
        """The indices of uint64 hashes: int32 of shape `(values, splits)`, ascending in a row."""
        bits = HASH_BITS // self.splits
        shifts = np.arange(self.splits - 1, -1, -1, dtype="uint64") * np.uint64(bits)
        digits = hashes[:, None] >> shifts
        if self.splits > 1:
            digits = (digits & np.uint64(2**bits - 1)).astype("uint32")  # divides faster
        # NumPy divides by a constant faster than it takes the remainder.
        group = digits.dtype.type(self.group)
        remainders = digits - digits // group * group
        starts = self.start + self.group * np.arange(self.splits, dtype="int32")
        return remainders.astype("int32") + starts


class Place(NamedTuple):
    """What an index stands for: a column, one of its groups, and the position in the group."""

    column: str
    split: int
    position: int

    @property
    def name(self) -> str:
        """The place as one word, such as `city:2:17`."""
        return f"{self.column}:{self.split}:{self.position}"

    @classmethod
    def parse(cls, name: str) -> Place:
        """The place with a name; the column's own name may contain colons."""
        found = re.fullmatch(r"(.*):(\d+):(\d+)", name, flags=re.DOTALL)
        if found is None:
            raise ValueError(
                "The name of a place must be column:split:position, for example `city:2:17`. "
                f"Received: {name!r}."
            )
        return cls(found[1], int(found[2]), int(found[3]))


class Layout:
    """The codes of all columns, one after the other in the row, and the text of missing values.

    `groups` are the widths of the columns' groups. `width` is the number of indices, `ones` how
    many of them a row has.
    """

    def __init__(self, groups: Mapping[str, int], splits: int, missing: str):
        self.splits, self.missing = splits, missing
        self.codes: dict[str, Code] = {}
        self.width, self.ones = 0, splits * len(groups)
        for name, group in groups.items():
            self.codes[name] = Code(self.width, group, splits)
            self.width += group * splits
        if self.width > 2**31 - 1:
            raise ValueError(
                f"Indices are int32, so a row has at most {2**31 - 1} of them. Received: columns "
                f"that need {self.width}. Use fewer columns, lower cardinalities, fewer `buckets`, "
                'a higher `collision_probability`, or layout="published".'
            )

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, different for layouts that can give different indices."""
        groups = [[name, code.group] for name, code in self.codes.items()]
        parts: list[Any] = [RECIPE, self.splits, self.missing, groups]
        text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def place(self, index: int) -> Place:
        """What an index stands for."""
        if not 0 <= index < self.width:
            raise ValueError(
                f"An index must be from 0 to {self.width - 1}. Received: index={index!r}."
            )
        name, code = [(n, c) for n, c in self.codes.items() if c.start <= index][-1]
        return Place(name, *divmod(index - code.start, code.group))

    def index(self, place: Place) -> int:
        """The index of a place."""
        code = self.codes.get(place.column)
        if code is None or place.split >= self.splits or place.position >= code.group:
            groups = ", ".join(f"{name!r} {one.group}" for name, one in self.codes.items())
            raise ValueError(
                f"A place must be in one of the columns, in one of its {self.splits} splits, and "
                f"below the width of the column's groups: {groups}. Received: {place.name!r}."
            )
        return code.start + place.split * code.group + place.position
