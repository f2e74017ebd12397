"""The hash code of a value, and where in the multi-hot row the codes of all columns are.

A column of a table occupies `splits` groups of equal width in the multi-hot row. The xxh64 hash of
the value's text (UTF-8, seed 0) is written as sixteen hexadecimal digits and cut into as many
groups of digits. Each group of digits, modulo the width, is the position of the one in its group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.arguments import as_integer, finite_number, positive_integer

RECIPE = "xxh64 of UTF-8, seed 0, groups of hexadecimal digits"
_LEAST_BUCKET = 32
_HASH_BITS = 64


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
        bits = _HASH_BITS // self.splits
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

    `width` is the number of indices, `ones` how many of them a row has.
    """

    def __init__(
        self, cardinalities: Mapping[str, int], probability: float | None, splits: int, missing: str
    ):
        self.splits, self.missing = splits, missing
        self.codes: dict[str, Code] = {}
        self.width, self.ones = 0, splits * len(cardinalities)
        for name, count in cardinalities.items():
            self.codes[name] = Code(self.width, safe_group(count, probability, splits), splits)
            self.width += self.codes[name].group * splits
        if self.width > 2**31 - 1:
            raise ValueError(
                f"Indices are int32, so a row has at most {2**31 - 1} of them. Received: columns "
                f"that need {self.width}. Use fewer columns, lower cardinalities, or a higher "
                "`collision_probability`."
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


def group_width(cardinality: int, splits: int = 4) -> int:
    """The published width of a group: `max(32, 4 * ceil(sqrt(cardinality))) / splits`.

    The width of the whole column does not depend on `splits`.
    """
    cardinality, splits = check_cardinality(cardinality), check_splits(splits)
    root = math.isqrt(cardinality - 1) + 1  # the square root, rounded up, without rounding errors
    return _check_group(max(_LEAST_BUCKET, 4 * root) // splits, splits)


def expected_collisions(cardinality: int, group: int | None = None, splits: int = 4) -> float:
    """How many pairs of a column's values share a code, on average over all sets of values.

    There are `n (n - 1) / 2` pairs, each with the probability that two hashes agree in all groups
    (the birthday problem). A group of digits modulo its width is not quite uniform; this is
    taken into account.

    Args:
        cardinality: how many values the column has.
        group: the width of a group; `None` for the published width.
        splits: how many groups there are.

    Raises:
        ValueError: if an argument is not a positive integer, or `splits` is not 1, 2 or 4.

    Example:
        >>> round(expected_collisions(100_000), 3)
        0.495
        >>> round(expected_collisions(100_000, splits=1))
        3943178
    """
    cardinality, splits = check_cardinality(cardinality), check_splits(splits)
    width = group_width(cardinality, splits) if group is None else positive_integer("group", group)
    numbers = 2 ** (_HASH_BITS // splits)
    often, larger = divmod(numbers, width)
    # `larger` of the remainders come up once more than the others.
    squares = larger * (often + 1) ** 2 + (width - larger) * often**2
    return cardinality * (cardinality - 1) / 2 * (squares / numbers**2) ** splits


def collision_probability(cardinality: int, group: int | None = None, splits: int = 4) -> float:
    """The probability that at least two values of a column share a code.

    `1 - exp(-expected_collisions)`, the Poisson approximation of the birthday problem (Feller,
    "An introduction to probability theory and its applications", 1968, II.3). With the published
    width it is about 0.39 for every large cardinality: four columns in ten have a pair of values
    that the model can't tell apart. The arguments and errors are those of `expected_collisions`.

    Example:
        >>> round(collision_probability(100_000), 2)
        0.39
        >>> round(collision_probability(100_000, group=840), 2)
        0.01
    """
    return -math.expm1(-expected_collisions(cardinality, group, splits))


def safe_group(cardinality: int, probability: float | None, splits: int = 4) -> int:
    """The smallest width of a group, from the published one up, with so few collisions.

    With four groups and a probability of 0.01 it is about `2.7 * sqrt(cardinality)`; with `None`
    it is the published one.
    """
    least = group_width(cardinality, splits)
    if probability is None:
        return least
    pairs = cardinality * (cardinality - 1) / 2
    # Exact for uniform groups, possibly infinite; for others, search from there.
    exact = (pairs / -math.log1p(-probability)) ** (1 / splits)
    group = _check_group(max(least, math.ceil(min(exact, 2.0**_HASH_BITS))), splits)
    while collision_probability(cardinality, group, splits) > probability:
        group = _check_group(group + 1, splits)
    while group > least and collision_probability(cardinality, group - 1, splits) <= probability:
        group -= 1
    return group


def check_cardinality(cardinality: Any, name: str = "cardinality") -> int:
    """A cardinality as Python's integer."""
    return positive_integer(name, cardinality, expected=", the number of values that a column has")


def check_splits(splits: Any) -> int:
    """A number of groups as Python's integer."""
    number = as_integer(splits)
    if number not in (1, 2, 4):
        raise ValueError(
            "`splits` must be 4 (the published code), 2, or 1 (one-hot), an integer. "
            f"Received: splits={splits!r}."
        )
    return number


def check_probability(probability: Any) -> None:
    """Refuses what is neither a number between 0 and 1 nor `None`."""
    expected = (
        "a number between 0 and 1, the highest accepted probability that two values of a column "
        "share a code, or None for the published width"
    )
    if probability is not None:
        finite_number("collision_probability", probability, expected, lambda one: 0 < one < 1)


def _check_group(group: int, splits: int) -> int:
    """Refuses a width that a group of digits can't fill, or that int32 can't count."""
    limit = 2 ** min(_HASH_BITS // splits, 30)
    if group > limit:
        raise ValueError(
            f"With splits={splits} a group is at most {limit} wide: its digits of the hash, and "
            f"int32 indices, can't tell more apart. Received: a group of width {group}. Use a "
            "lower cardinality, a higher `collision_probability`, or other `splits`."
        )
    return group
