"""How wide a column's groups of indices are, and how many of its values then share a code.

There are two layouts. In the one called `"wide"` a column has eight indices for each of its values,
so a linear model can give nearly every value its own weight. The published one grows with the
square root of the number of values: it tells the values apart, but has too few weights for them.
"""

from __future__ import annotations

import math
from typing import Any

from keras_multigpu.arguments import as_integer, check_choice, finite_number, positive_integer

HASH_BITS = 64
BUCKETS = 8
_SPLITS = {"wide": 2, "published": 4}
_LEAST_BUCKET = 32  # of a column in the published layout, of a group in the wide one


def group_width(
    cardinality: int, splits: int, layout: str = "wide", buckets: float | None = None
) -> int:
    """The width of each of a column's groups.

    Published: `max(32, 4 * ceil(sqrt(cardinality))) / splits`. Wide: the larger one of 32 and
    `buckets * cardinality / splits`. The width of a large column does not depend on `splits`.
    """
    cardinality = check_cardinality(cardinality)
    if layout == "published":
        root = math.isqrt(cardinality - 1) + 1  # rounded up, without rounding errors
        return _check_group(max(_LEAST_BUCKET, 4 * root) // splits, splits)
    wanted = math.ceil((BUCKETS if buckets is None else buckets) * cardinality / splits)
    return _check_group(max(_LEAST_BUCKET, wanted), splits)


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
    cardinality, splits = check_cardinality(cardinality), layout_splits(layout, splits)
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


def column_group(
    cardinality: int, layout: str, splits: int, buckets: float | None, probability: float | None
) -> int:
    """The width of each of a column's groups, with so few collisions as is asked for."""
    least = group_width(cardinality, splits, layout, buckets)
    return safe_group(cardinality, probability, splits, least)


def safe_group(cardinality: int, probability: float | None, splits: int, least: int) -> int:
    """The smallest width of a group, from `least` up, with so few collisions.

    With four groups and a probability of 0.01 it is about `2.7 * sqrt(cardinality)`; with `None`
    it is `least`.
    """
    if probability is None:
        return least
    pairs = cardinality * (cardinality - 1) / 2
    # Exact for uniform groups, possibly infinite; for others, search from there.
    exact = (pairs / -math.log1p(-probability)) ** (1 / splits)
    group = _check_group(max(least, math.ceil(min(exact, 2.0**HASH_BITS))), splits)
    while collision_probability(cardinality, group, splits) > probability:
        group = _check_group(group + 1, splits)
    while group > least and collision_probability(cardinality, group - 1, splits) <= probability:
        group -= 1
    return group


def check_cardinality(cardinality: Any, name: str = "cardinality") -> int:
    """A cardinality as Python's integer."""
    return positive_integer(name, cardinality, expected=", the number of values that a column has")


def layout_splits(layout: Any, splits: Any = None) -> int:
    """The number of groups as Python's integer: the layout's own, unless one is given."""
    check_choice("layout", layout, *_SPLITS)
    if splits is None:
        return _SPLITS[layout]
    number = as_integer(splits)
    if number not in (1, 2, 4):
        raise ValueError(
            "`splits` must be 4 (the published code), 2, or 1 (one-hot), an integer, or None for "
            f"the layout's number. Received: splits={splits!r}."
        )
    return number


def check_buckets(buckets: Any, layout: str) -> None:
    """Refuses what is no positive number, and a number where the published layout fixes it."""
    if buckets is None:
        return
    if layout == "published":
        raise ValueError(
            "The published layout fixes the width of a column: leave `buckets` out. Received: "
            f"buckets={buckets!r}, layout={layout!r}."
        )
    expected = "a positive number, the indices that a column has for each of its values"
    finite_number("buckets", buckets, expected, lambda one: 0 < one < 2**30)


def check_probability(probability: Any) -> None:
    """Refuses what is neither a number between 0 and 1 nor `None`."""
    expected = (
        "a number between 0 and 1, the highest accepted probability that two values of a column "
        "share a code, or None for the layout's own width"
    )
    if probability is not None:
        finite_number("collision_probability", probability, expected, lambda one: 0 < one < 1)


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
