"""How likely two values of a column share a code, and the width that makes it unlikely."""

from __future__ import annotations

import math

from keras_multigpu.sparse.code import check_cardinality, check_group, check_splits, group_width

_BEYOND = 2.0**64  # wider than any group: the exact width may be infinite


def expected_collisions(cardinality: int, group: int | None = None, splits: int = 4) -> float:
    """How many pairs of a column's values have the same code, on average over all sets of values.

    `n (n - 1) / 2` pairs, each with the probability that two hashes agree in all groups: the
    birthday problem. A group of digits modulo its width is not quite uniform, which is counted.

    Args:
        cardinality: how many values the column has.
        group: the width of a group, `None` for that of the published rule.
        splits: how many groups there are.

    Raises:
        ValueError: if an argument is not a positive integer, or `splits` is not 1, 2 or 4.

    Example:
        >>> round(expected_collisions(100_000), 3)
        0.495
        >>> round(expected_collisions(100_000, splits=1))
        3943178
    """
    check_splits(splits)
    group = group_width(cardinality, splits) if group is None else group
    check_cardinality(group, "group")
    check_cardinality(cardinality)
    return cardinality * (cardinality - 1) / 2 * _agreement(group, splits) ** splits


def collision_probability(cardinality: int, group: int | None = None, splits: int = 4) -> float:
    """The probability that some two values of a column have the same code.

    `1 - exp(-expected_collisions)`, the Poisson approximation of the birthday problem (Feller,
    "An introduction to probability theory and its applications", 1968, II.3). By the published
    rule it is about 0.39 for a column of any large cardinality: four columns in ten have a pair
    of values that the model can't tell apart.

    Args:
        cardinality: how many values the column has.
        group: the width of a group, `None` for that of the published rule.
        splits: how many groups there are.

    Raises:
        ValueError: if an argument is not a positive integer, or `splits` is not 1, 2 or 4.

    Example:
        >>> round(collision_probability(100_000), 2)
        0.39
        >>> round(collision_probability(100_000, group=840), 2)
        0.01
    """
    return -math.expm1(-expected_collisions(cardinality, group, splits))


def safe_group(cardinality: int, probability: float, splits: int = 4) -> int:
    """The least width of a group for which collisions are as unlikely as asked for.

    It is never below that of the published rule. With four groups and a probability of 0.01 it
    is about `2.7 * sqrt(cardinality)`.

    Args:
        cardinality: how many values the column has.
        probability: the highest accepted probability of any collision, between 0 and 1.
        splits: how many groups there are.

    Raises:
        ValueError: if an argument is not of that kind, or no width is enough.

    Example:
        >>> safe_group(100_000, 0.01)
        840
    """
    check_probability(probability)
    least = group_width(cardinality, splits)
    pairs = cardinality * (cardinality - 1) / 2
    accepted = -math.log1p(-probability)
    # Exact for uniform groups, and a few steps short for others.
    exact = (pairs / accepted) ** (1 / splits)
    group = check_group(max(least, math.ceil(min(exact, _BEYOND))), splits)
    while collision_probability(cardinality, group, splits) > probability:
        group = check_group(group + 1, splits)
    while group > least and collision_probability(cardinality, group - 1, splits) <= probability:
        group -= 1
    return group


def check_probability(probability: object) -> None:
    """Refuses what is not a number between 0 and 1.

    Raises:
        ValueError: if it is not.
    """
    is_number = isinstance(probability, (int, float)) and not isinstance(probability, bool)
    if not is_number or not 0 < probability < 1:  # type: ignore[operator]
        raise ValueError(
            "`collision_probability` must be a number between 0 and 1, the highest accepted "
            "probability that two values of a column share a code, or None for the published "
            f"width. Received: collision_probability={probability!r}."
        )


def _agreement(group: int, splits: int) -> float:
    """The probability that two hashes agree in one group."""
    numbers = 2 ** (64 // splits)
    often, larger = divmod(numbers, group)
    # `larger` of the remainders come up once more than the others.
    squares = larger * (often + 1) ** 2 + (group - larger) * often**2
    return squares / numbers**2
