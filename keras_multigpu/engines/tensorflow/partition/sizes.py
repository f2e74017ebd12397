"""Dimensions as polynomials in the batch size and in other sizes that are known only when run.

A dimension is an `int` or a `Dim`. A statement about dimensions has to hold for every size that the
step may meet: two are equal only if their polynomials are. What can't be decided is `Unknown`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

Dims: TypeAlias = "tuple[int | Dim, ...]"

BATCH = "batch"
ROWS, SIZE = "rows", "size"  # of the names of symbols: what is chosen of the batch's rows; others
SAMPLE = 32  # rows, and the size of every other symbol: for estimates only


class Unknown(Exception):  # noqa: N818 - an answer, caught where the question is asked
    """The polynomials don't decide the question."""


class Dim:
    """A polynomial with integer coefficients: {sorted names of symbols: coefficient}."""

    __slots__ = ("terms",)

    def __init__(self, terms: dict[tuple[str, ...], int]):
        self.terms = terms

    @staticmethod
    def symbol(name: str) -> Dim:
        """The polynomial that is one symbol."""
        return Dim({(name,): 1})

    def __add__(self, other: Any) -> Any:
        terms = dict(self.terms)
        for key, factor in _terms(other).items():
            terms[key] = terms.get(key, 0) + factor
        return _simple(terms)

    def __mul__(self, other: Any) -> Any:
        terms: dict[tuple[str, ...], int] = {}
        for a, p in self.terms.items():
            for b, q in _terms(other).items():
                key = tuple(sorted(a + b))
                terms[key] = terms.get(key, 0) + p * q
        return _simple(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __floordiv__(self, other: Any) -> Any:
        return divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return divide(other, self)

    def __mod__(self, other: Any) -> int:
        divide(self, other)  # raises if there is a rest, or may be one
        return 0

    def __eq__(self, other: Any) -> bool:
        try:
            return self.terms == _terms(other)
        except (TypeError, ValueError):
            return NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __lt__(self, other: Any) -> bool:
        return _sign(self - other) < 0

    def __gt__(self, other: Any) -> bool:
        return _sign(self - other) > 0

    def __le__(self, other: Any) -> bool:
        return _at_least(other - self)

    def __ge__(self, other: Any) -> bool:
        return _at_least(self - other)

    def __repr__(self) -> str:
        return " + ".join(
            "*".join(([str(factor)] if factor != 1 or not key else []) + list(key))
            for key, factor in self.terms.items()
        )


def _terms(value: Any) -> dict[tuple[str, ...], int]:
    if isinstance(value, Dim):
        return value.terms
    return {(): int(value)} if value else {}


def _simple(terms: dict[tuple[str, ...], int]) -> int | Dim:
    terms = {key: factor for key, factor in terms.items() if factor}
    if not terms:
        return 0
    return terms[()] if set(terms) == {()} else Dim(terms)


def _sign(value: Any) -> int:
    """The sign, if it is the same for all sizes >= 0 of the symbols."""
    terms = _terms(value)
    if not terms:
        return 0
    rest, constant = [f for key, f in terms.items() if key], terms.get((), 0)
    if not rest:
        return 1 if constant > 0 else -1
    if all(f > 0 for f in rest) and constant > 0:
        return 1
    if all(f < 0 for f in rest) and constant < 0:
        return -1
    raise Unknown


def _at_least(value: Any) -> bool:
    """Whether a value is >= 0, if it is so for all sizes >= 0 of the symbols, or for none."""
    return all(factor > 0 for factor in _terms(value).values()) or _sign(value) >= 0


def divide(a: Any, b: Any) -> Any:
    """`a / b`, if there is no rest for any size of the symbols, and `b` is a product."""
    if isinstance(a, int) and isinstance(b, int):
        if b and a % b == 0:
            return a // b
        raise Unknown
    divisor = _terms(b)
    if len(divisor) != 1:
        if a == b and divisor:
            return 1
        raise Unknown
    ((symbols, factor),) = divisor.items()
    terms = {}
    for key, one in _terms(a).items():
        rest = list(key)
        for symbol in symbols:
            if symbol not in rest:
                raise Unknown
            rest.remove(symbol)
        if one % factor:
            raise Unknown
        terms[tuple(rest)] = one // factor
    return _simple(terms)


def quotient(a: Any, b: Any) -> Any:
    """`a / b`; `None` if the polynomials don't say what it is."""
    try:
        return divide(a, b)
    except Unknown:
        return None


@dataclasses.dataclass(frozen=True)
class Unit:
    """What the entries of an axis belong to: to each of so many rows as many `times`.

    The `rows` are the batch's, or those of a part of it that a step has chosen.
    """

    rows: Any
    times: Any

    @property
    def symbols(self) -> set[str]:
        """The symbols in it."""
        return symbols_of([self.rows, self.times])


def unit_of(dim: Any, batch: Any, known: Collection[Any] = ()) -> Unit | None:
    """The rows that a dimension is a multiple of; `None` if it is of none.

    `known`: the numbers of rows beside the batch's, where they have no symbols of their own.
    """
    names = [name for name in sorted(symbols_of([dim])) if name.startswith(ROWS)]
    kind = type(dim)
    numbers = [one for one in known if isinstance(one, kind)]
    numbers.sort(key=repr if kind is Dim else int, reverse=True)
    for rows in (batch, *map(Dim.symbol, names), *numbers):
        times = quotient(dim, rows)
        if times is not None:
            return Unit(rows, times)
    return Unit(dim, 1) if names else None


def product(dims: Iterable[Any]) -> Any:
    """The number of elements."""
    result: Any = 1
    for dim in dims:
        result = result * dim
    return result


def is_known(dims: Iterable[Any]) -> bool:
    """Whether all dimensions are numbers."""
    return not any(isinstance(dim, Dim) for dim in dims)


def symbols_of(dims: Iterable[Any]) -> set[str]:
    """The names of the symbols in dimensions."""
    return {name for dim in dims if isinstance(dim, Dim) for key in dim.terms for name in key}


def broadcast(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """The shape that shapes broadcast to.

    Raises:
        Unknown: if two sizes differ of which either may be 1.
    """
    rank = max(map(len, shapes))
    result: list[Any] = [1] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            known = result[axis]
            if known == dim or (isinstance(dim, int) and dim == 1):
                continue
            if isinstance(known, int) and known == 1:
                result[axis] = dim
            elif isinstance(known, int) and isinstance(dim, Dim):
                pass  # the symbol is 1, or this number
            elif isinstance(dim, int) and isinstance(known, Dim):
                result[axis] = dim
            else:
                raise Unknown
    return tuple(result)


def elements_of(dims: Any, sample: int = SAMPLE) -> float:
    """A rough number of elements: rows count as `sample`, as do two other unknown sizes."""
    keys = [key for dim in dims or () if isinstance(dim, Dim) for key in dim.terms]
    others = dict.fromkeys(name for key in keys for name in key if name != BATCH)
    counted, result = {BATCH, *list(others)[:2]}, 1.0
    for dim in dims or ():
        if isinstance(dim, Dim):
            dim = sum(
                factor * sample ** sum(name in counted for name in key)
                for key, factor in dim.terms.items()
            )
        result *= max(0, dim or 0)
    return result
