"""The hash code of a value, where the codes of all columns are in the row, and how often they meet.

A column of a table occupies `splits` groups of equal width in the multi-hot row. The xxh64 hash of
the value's text (UTF-8, seed 0) is written as sixteen hexadecimal digits and cut into as many
groups of digits. Each group of digits, modulo the width, is the position of the one in its group.

There are two layouts. In the one called `"wide"` a column has eight indices for each of its values,
so a linear model can give nearly every value its own weight. The published one grows with the
square root of the number of values: it tells the values apart, but has too few weights for them.
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

from keras_multigpu.arguments import as_integer, check_choice, positive_integer
from keras_multigpu.sparse.missing import EMPTY_FIELDS, Missing

RECIPE = "xxh64 of UTF-8, seed 0, groups of hexadecimal digits"
BUCKETS = 8
HASH_BITS = 64
_SPLITS = {"wide": 2, "published": 4}
_LEAST_BUCKET = 32  # of a column in the published layout, of a group in the wide one


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
        return ":".join(map(str, self))

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
    """The codes of all columns, one after the other in the row, and which values are missing.

    `groups` are the widths of the columns' groups. `width` is the number of indices, `ones` how
    many of them a row has.
    """

    def __init__(self, groups: Mapping[str, int], splits: int, missing: Missing):
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
        parts: list[Any] = [RECIPE, self.splits, self.missing.text, groups]
        if self.missing.setting != EMPTY_FIELDS:  # which had no name in earlier versions
            parts.append(self.missing.setting)
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


def expected_collisions(
    cardinality: int, group: int | None = None, splits: int | None = None, layout: str = "wide"
) -> float:
    """How many pairs of a column's values share a code, on average over all sets of values.

    There are `n (n - 1) / 2` pairs, each with the probability that two hashes agree in all groups
    (the birthday problem). A group of digits modulo its width is not quite uniform; this is
    taken into account.

    Args:
        cardinality: how many values the column has.
        group: the width of a group; `None` for the layout's.
        splits: how many groups there are; `None` for the layout's number.
        layout: `"wide"` or `"published"`, as for `HashEncoder`.

    Raises:
        ValueError: if an argument is not a positive integer, `splits` is not 1, 2 or 4, or there
            is no such layout.

    Example:
        >>> round(expected_collisions(100_000), 3)
        0.031
        >>> round(expected_collisions(100_000, layout="published"), 3)
        0.495
        >>> round(expected_collisions(100_000, splits=1))
        6250
    """
    cardinality, splits = check_cardinality(cardinality), find_splits(layout, splits)
    if group is None:
        width = group_width(cardinality, splits, layout)
    else:
        width = positive_integer("group", group)
    numbers = 2 ** (HASH_BITS // splits)
    often, larger = divmod(numbers, width)
    # `larger` of the remainders come up once more than the others.
    squares = larger * (often + 1) ** 2 + (width - larger) * often**2
    return cardinality * (cardinality - 1) / 2 * (squares / numbers**2) ** splits


def collision_probability(
    cardinality: int, group: int | None = None, splits: int | None = None, layout: str = "wide"
) -> float:
    """The probability that at least two values of a column share a code.

    `1 - exp(-expected_collisions)`, the Poisson approximation of the birthday problem (Feller,
    "An introduction to probability theory and its applications", 1968, II.3). For every large
    cardinality it is about 0.03, and 0.39 in the published layout: three columns in a hundred, or
    four in ten, have a pair of values that the model can't tell apart. The arguments and errors are
    those of `expected_collisions`.

    Example:
        >>> round(collision_probability(100_000), 2)
        0.03
        >>> round(collision_probability(100_000, layout="published"), 2)
        0.39
        >>> round(collision_probability(100_000, group=840, splits=4), 2)
        0.01
    """
    return -math.expm1(-expected_collisions(cardinality, group, splits, layout))


def group_width(
    cardinality: int,
    splits: int,
    layout: str,
    buckets: float | None = None,
    probability: float | None = None,
) -> int:
    """The width of each of a column's groups.

    Published: `max(32, 4 * ceil(sqrt(cardinality))) / splits`. Wide: the larger one of 32 and
    `buckets * cardinality / splits`. The width of a large column does not depend on `splits`. With
    a `probability`, the smallest width from there up at which collisions are not more probable:
    with four groups and 0.01, about `2.7 * sqrt(cardinality)`.
    """
    if layout == "published":
        root = math.isqrt(cardinality - 1) + 1  # rounded up, without rounding errors
        least = max(_LEAST_BUCKET, 4 * root) // splits
    else:
        wanted = math.ceil((BUCKETS if buckets is None else buckets) * cardinality / splits)
        least = max(_LEAST_BUCKET, wanted)
    group = _check_group(least, splits)
    if probability is None:
        return group
    pairs = cardinality * (cardinality - 1) / 2
    # Exact for uniform groups, possibly infinite; for others, search from there.
    exact = (pairs / -math.log1p(-probability)) ** (1 / splits)
    group = _check_group(max(least, math.ceil(min(exact, 2.0**HASH_BITS))), splits)
    while collision_probability(cardinality, group, splits) > probability:
        group = _check_group(group + 1, splits)
    while group > least and collision_probability(cardinality, group - 1, splits) <= probability:
        group -= 1
    return group


def _check_group(group: int, splits: int) -> int:
    """Refuses a width that a group of digits can't fill, or that int32 can't count."""
    limit = 2 ** min(HASH_BITS // splits, 30)
    if group > limit:
        raise ValueError(
            f"With splits={splits} a group is at most {limit} wide: its digits of the hash, and "
            f"int32 indices, can't tell more apart. Received: a group of width {group}. Use a "
            "lower cardinality, a higher `collision_probability`, fewer `buckets`, other `splits`, "
            "or layout='published'."
        )
    return group


def find_splits(layout: Any, splits: Any = None) -> int:
    """The number of groups: the layout's own, unless one is given."""
    check_choice("layout", layout, *_SPLITS)
    number = _SPLITS[layout] if splits is None else as_integer(splits)
    if number not in (1, 2, 4):
        raise ValueError(
            "`splits` must be 4 (the published code), 2, or 1 (one-hot), an integer, or None for "
            f"the layout's number. Received: splits={splits!r}."
        )
    return number


def check_cardinality(cardinality: Any, name: str = "cardinality") -> int:
    """A cardinality as Python's integer."""
    return positive_integer(name, cardinality, expected=", the number of values that a column has")
