"""The code of a value: which columns of the multi-hot row are one.

A column of a table is given `bucket` columns of the row, in `splits` groups of equal width. The
xxh64 hash of the value's text (UTF-8, seed 0), written as sixteen hexadecimal digits, is cut into
as many groups of digits; each, modulo the group's width, says where in its group the one is.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

SPLITS = (1, 2, 4)
_LEAST_BUCKET = 32
_HASH_BITS = 64


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of the values of one column.

    Attributes:
        start: the column's first index in the row.
        group: how many indices a group has.
        splits: how many groups there are, and so how many ones a value has: 1, 2 or 4.

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

    @property
    def bucket(self) -> int:
        """How many indices the column has."""
        return self.group * self.splits

    def indices(self, hashes: np.ndarray) -> np.ndarray:
        """The indices of values, from their hashes.

        Args:
            hashes: xxh64 hashes, uint64, of shape `(values,)`.

        Returns:
            int32, of shape `(values, splits)`, rising in each row.
        """
        bits = _HASH_BITS // self.splits
        shifts = np.arange(self.splits - 1, -1, -1, dtype="uint64") * np.uint64(bits)
        digits = hashes[:, None] >> shifts
        if self.splits > 1:
            digits &= np.uint64(2**bits - 1)
            digits = digits.astype("uint32")  # its division is the faster one
        # NumPy divides by a constant faster than it takes the remainder.
        remainders = digits - digits // digits.dtype.type(self.group) * digits.dtype.type(
            self.group
        )
        starts = self.start + self.group * np.arange(self.splits, dtype="int32")
        return remainders.astype("int32") + starts


def group_width(cardinality: int, splits: int = 4) -> int:
    """The width of a group by the published rule: `max(32, 4 * ceil(sqrt(cardinality))) / splits`.

    The rule is that of the whole column, all groups together, and does not depend on `splits`.

    Args:
        cardinality: how many values the column has, 1 or more.
        splits: how many groups the column has: 1, 2 or 4.

    Raises:
        ValueError: if an argument is none of these, or the hash has not the digits for it.

    Example:
        >>> group_width(10), group_width(100_000), group_width(100_000, splits=1)
        (8, 317, 1268)
    """
    check_cardinality(cardinality)
    check_splits(splits)
    splits = int(splits)  # NumPy's integers are not written to JSON
    root = math.isqrt(cardinality - 1) + 1  # the square root, rounded up, without rounding errors
    return check_group(max(_LEAST_BUCKET, 4 * root) // splits, splits)


def check_group(group: int, splits: int) -> int:
    """A width that a group of digits can fill, and int32 can count.

    Raises:
        ValueError: if it can't.
    """
    limit = 2 ** min(_HASH_BITS // splits, 30)
    if group > limit:
        raise ValueError(
            f"With splits={splits} a group is at most {limit} wide, which is what its digits of "
            f"the hash, and int32 indices, can tell apart. Received: a group of width {group}. "
            "Take a lower cardinality, a higher `collision_probability`, or other `splits`."
        )
    return group


def check_cardinality(cardinality: object, name: str = "cardinality") -> None:
    """Refuses what is not a positive integer.

    Raises:
        ValueError: if it is not.
    """
    is_integer = isinstance(cardinality, (int, np.integer)) and not isinstance(cardinality, bool)
    if not is_integer or cardinality < 1:  # type: ignore[operator]
        raise ValueError(
            f"`{name}` must be a positive integer, the number of values that a column has. "
            f"Received: {name}={cardinality!r}."
        )


def check_splits(splits: object) -> None:
    """Refuses a number of groups into which sixteen digits are not cut.

    Raises:
        ValueError: if it is one.
    """
    is_integer = isinstance(splits, (int, np.integer)) and not isinstance(splits, bool)
    if not is_integer or splits not in SPLITS:
        raise ValueError(
            "`splits` must be 4 (the published code), 2, or 1 (one-hot), an integer. "
            f"Received: splits={splits!r}."
        )
