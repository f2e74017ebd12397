"""Where in the multi-hot row each column of a table has its indices."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_multigpu.sparse.code import Code

RECIPE = "xxh64 of UTF-8, seed 0, groups of hexadecimal digits"


class Place(NamedTuple):
    """What an index stands for.

    Attributes:
        column: the table's column.
        split: which group of the column, from 0.
        position: where in the group, from 0: the group's digits modulo its width.
    """

    column: str
    split: int
    position: int

    @property
    def name(self) -> str:
        """The place in one word: `city:2:17`."""
        return f"{self.column}:{self.split}:{self.position}"

    @classmethod
    def parse(cls, name: str) -> Place:
        """The place that has a name; a column's name may have colons in it.

        Raises:
            ValueError: if it is no such name.
        """
        parts = name.rsplit(":", 2)
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise ValueError(
                "A place's name must be column:split:position, `city:2:17`, say. "
                f"Received: {name!r}."
            )
        return cls(parts[0], int(parts[1]), int(parts[2]))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The codes of all columns of a table, one after the other.

    Attributes:
        codes: the code of each column, in order.
        splits: how many ones a value has.
        missing: the text of a missing value.
    """

    codes: Mapping[str, Code]
    splits: int
    missing: str

    @classmethod
    def of(cls, groups: Mapping[str, int], splits: int, missing: str) -> Layout:
        """The layout of columns whose groups are so wide."""
        codes, start = {}, 0
        for name, group in groups.items():
            codes[name] = Code(start, group, splits)
            start += codes[name].bucket
        if start > 2**31 - 1:
            raise ValueError(
                f"Indices are int32, so a row has at most {2**31 - 1} of them. Received: columns "
                f"that need {start}. Take fewer columns, lower cardinalities, or a higher "
                "`collision_probability`."
            )
        return cls(codes, splits, missing)

    @property
    def width(self) -> int:
        """How many indices there are."""
        return sum(code.bucket for code in self.codes.values())

    @property
    def ones(self) -> int:
        """How many ones a row has."""
        return self.splits * len(self.codes)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ where a value's indices can."""
        groups = [[name, code.group] for name, code in self.codes.items()]
        parts: list[Any] = [RECIPE, self.splits, self.missing, groups]
        text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def place(self, index: int) -> Place:
        """What an index stands for.

        Raises:
            ValueError: if there is no such index.
        """
        if not 0 <= index < self.width:
            raise ValueError(
                f"An index must be from 0 to {self.width - 1}. Received: index={index!r}."
            )
        names = list(self.codes)
        starts = [code.start for code in self.codes.values()]
        name = names[bisect.bisect_right(starts, index) - 1]
        code = self.codes[name]
        return Place(name, *divmod(index - code.start, code.group))

    def index(self, place: Place) -> int:
        """The index of a place.

        Raises:
            ValueError: if there is no such place.
        """
        code = self.codes.get(place.column)
        if code is None or place.split >= self.splits or place.position >= code.group:
            groups = ", ".join(f"{name!r} {one.group}" for name, one in self.codes.items())
            raise ValueError(
                f"A column has {self.splits} splits, each of them as many positions as its group "
                f"is wide: {groups}. Received: {place.name!r}."
            )
        return code.start + place.split * code.group + place.position
