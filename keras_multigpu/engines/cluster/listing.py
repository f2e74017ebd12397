"""What processes compare, piece by piece: operations of a step, facts of a model, values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines.shared import is_array

_LONGEST = 240  # characters of a fact that people see
COMPARED = 1024
"""How many elements of each array in a batch the processes compare."""


def digest_of(arrays: Sequence[Any], count: int) -> int:
    """A 31-bit checksum of arrays: shapes, types, and about `count` values of each."""
    digest = 0
    for leaf in arrays:
        array = np.asarray(leaf)
        some = array.reshape(-1)[:: max(1, array.size // count)]
        digest = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), digest)
        digest = zlib.crc32(some.tobytes(), digest)
    return digest >> 1


def describe(data: Any) -> str:
    """The types and shapes of a batch, for people."""

    def name(one: Any) -> Any:
        if not is_array(one):
            return one
        shape = getattr(one, "shape", ())
        if getattr(shape, "rank", 0) is None:
            return f"{one.dtype.name}(?)"
        axes = ["rows", *("?" if axis is None else str(axis) for axis in shape[1:])]
        kind = type(one).__name__.removesuffix("Tensor").lower()
        kind = f"{kind} " if kind in ("sparse", "ragged") else ""
        return f"{kind}{one.dtype.name}({', '.join(axes[: len(shape)])})"

    return repr(keras.tree.map_structure(name, data)).replace("'", "")


@dataclasses.dataclass
class Listing:
    """The operations on which a step's results depend, in the order in which they were traced.

    Names, which may be automatic, don't count, nor do prints and what else leaves no result.

    Attributes:
        digests: a checksum of each operation: its kind, settings, inputs, and outputs' shapes.
        texts: what people see of each, as `str` gives it.
    """

    digests: list[int] = dataclasses.field(default_factory=list)
    texts: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of_all(cls, listings: Iterable[Listing]) -> Listing:
        """Several, one after the other."""
        found = cls()
        for one in listings:
            found.digests += one.digests
            found.texts += one.texts
        return found

    def add(self, facts: Any, text: Any) -> None:
        """Adds an operation."""
        self.digests.append(zlib.crc32(repr(facts).encode()))
        self.texts.append(text)

    @classmethod
    def of_values(cls, named: Iterable[tuple[str, Any]], places: Iterable[int] = ()) -> Listing:
        """Arrays in place of operations, each with its name, and its place if they are some."""
        found = cls()
        for (name, value), place in itertools.zip_longest(named, places):
            found.add((place, digest_of([value], sys.maxsize)), _Named(name, value))
        return found

    @functools.cached_property
    def checksum(self) -> int:
        """Of all operations, with 31 bits; not 0."""
        return (zlib.crc32(repr(self.digests).encode()) >> 1) or 1

    def told(self, one: list[int], other: list[int]) -> str:
        """The first operation in which two listings differ, if this is one of them."""
        pairs = enumerate(zip(one, other))
        place = next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))
        return str(self.texts[place]) if place < len(self.texts) else "nothing more"


def around_difference(one: str, other: str) -> tuple[str, str]:
    """Two long texts, as far as people see them: near the first character that differs."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
    begin = max(len([*alike]) - _LONGEST // 2, 0)
    return _cut(one, begin), _cut(other, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _LONGEST
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"


@dataclasses.dataclass(frozen=True)
class _Named:
    """An array, which is summed if people get to see it."""

    name: str
    value: Any

    def __str__(self) -> str:
        array = np.asarray(self.value)
        is_number = array.dtype.kind not in "OSU"
        return self.name + (f" with a sum of {array.sum(dtype='float64'):.6g}" if is_number else "")
