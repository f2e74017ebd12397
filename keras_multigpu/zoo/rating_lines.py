"""The lines of a file of ratings: their form, their columns, and their errors."""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from keras_multigpu.sparse.lines import explain_line, read_fields
from keras_multigpu.sparse.sources import BadDataError, to_number, to_numbers

_COLUMNS = ("user", "item", "rating")
_NAMES = {
    "user": ("user", "userid", "reviewerid"),
    "item": ("item", "itemid", "movie", "movieid", "asin", "parentasin", "productid"),
    "rating": ("rating", "overall", "score"),
}
# Delimiters of Arrow are one character: `::` is read as `:` with an empty field after it.
_DELIMITERS = {"::": ":", "\t": "\t", ",": ",", ";": ";"}
_HEADER = re.compile(rb"\s*[^\n]*\n?")  # blank lines may come first
NO_LIMIT = float(np.finfo("float64").max)


class Form(NamedTuple):
    """The form of a file's lines; `places` are those of the user, the item and the rating."""

    delimiter: str
    places: tuple[int, ...]
    fields: int
    has_header: bool

    def split(self, line: bytes) -> list[str]:
        """The fields of a line."""
        text = line.decode("utf-8", errors="replace").replace("\r", "")
        if self.delimiter != "," or '"' not in text:
            return text.split(self.delimiter)
        return next(csv.reader([text]), [])


class Columns(NamedTuple):
    """The good lines of a block, with users and items as they are written, and float64 ratings.

    `malformed` lines had too few or too many fields. `unusable` ones had no user, no item, or no
    allowed rating.
    """

    users: pa.DictionaryArray
    items: pa.DictionaryArray
    ratings: np.ndarray
    malformed: int
    unusable: int


def find_form(path: str, block: bytes, skips: bool) -> Form:
    """The form of a file from its first line, or, if bad lines are skipped, its first good line."""
    lines = [line for line in block.splitlines() if line.strip()] or [b""]
    for number, line in enumerate(lines[: 100 if skips else 1]):
        text = line.decode("utf-8", errors="replace")
        found = [form for mark in _DELIMITERS if mark in text and (form := _form(mark, line))]
        if found:
            return found[0]._replace(has_header=found[0].has_header and not number)
    raise BadDataError(
        f"{path}, line 1: a file of ratings must have a user, an item and a rating in each line, "
        "with tabs, `::` or commas between them, or a header that names them (`userId`, "
        f"`movieId`, `rating`). Received: {lines[0][:60]!r}."
    )


def _form(mark: str, line: bytes) -> Form | None:
    """The form that a line with a delimiter has; `None` if the line makes no sense with it."""
    step = len(mark)
    fields = Form(_DELIMITERS[mark], (), 0, False).split(line)
    # RecBole writes the type behind the name: `user_id:token`.
    names = [name.split(":")[0].strip().lower().replace("_", "") for name in fields]
    places = [
        next((place for place, name in enumerate(names) if name in _NAMES[column]), None)
        for column in _COLUMNS
    ]
    if all(place is not None for place in places):
        return Form(_DELIMITERS[mark], tuple(places), len(fields), True)  # type: ignore[arg-type]
    if len(fields) > 2 * step and np.isfinite(to_number(fields[2 * step])):
        return Form(_DELIMITERS[mark], (0, step, 2 * step), len(fields), False)
    return None


def parse(path: str, form: Form, line: int, data: bytes, limit: float, skips: bool) -> Columns:
    """The columns of a block that begins with line number `line`.

    Ratings above `limit` are bad. The first bad line is a `BadDataError`, unless `skips`.
    """
    if line == 1 and form.has_header:
        header = _HEADER.match(data)
        assert header is not None
        line, data = 1 + header[0].count(b"\n"), data[header.end() :]
    kept = _drop_open(form, data)
    names = [str(place) for place in range(form.fields)]
    quote = '"' if form.delimiter == "," else False
    table, found = read_fields(
        kept, names, [names[n] for n in form.places], delimiter=form.delimiter, quote_char=quote
    )
    table = table.rename_columns(list(_COLUMNS))
    malformed = len(found) + data.count(b"\n") - kept.count(b"\n")
    ratings = to_numbers(table.column("rating"))
    is_good = (ratings > 0) & (ratings <= limit)
    for name in ("user", "item"):
        is_good &= ~np.asarray(table.column(name).is_null())
    if (malformed or not is_good.all()) and not skips:
        raise _first_bad(path, form, line, data, limit)
    if not is_good.all():
        table = table.filter(pa.array(is_good))
    users, items = (
        table.column(name).combine_chunks().dictionary_encode() for name in ("user", "item")
    )
    return Columns(users, items, ratings[is_good], malformed, int((~is_good).sum()))


def _drop_open(form: Form, data: bytes) -> bytes:
    """The lines without those that have an open quote, which would swallow the next lines."""
    if form.delimiter != "," or b'"' not in data:
        return data
    return b"\n".join(line for line in data.split(b"\n") if not line.count(b'"') % 2)


def _first_bad(path: str, form: Form, first: int, data: bytes, limit: float) -> BadDataError:
    """The error for the first bad line of a block, whose lines are read again one by one."""
    found = (
        (number, problem)
        for number, line in enumerate(data.split(b"\n"), first)
        if line.rstrip(b"\r") and (problem := _find_problem(form, line, limit))
    )
    number, problem = next(found, (first, "a number in these lines can't be read."))
    return explain_line(path, number, problem)


def _find_problem(form: Form, line: bytes, limit: float) -> str:
    """What is wrong with a line; an empty text if it is good."""
    start = line[:60]
    if _drop_open(form, line) != line:
        return f"a line must not have a quotation mark that is not closed. Received: {start!r}."
    fields = form.split(line)
    if len(fields) != form.fields:
        expected = form.fields if form.delimiter != ":" else (form.fields + 1) // 2
        return f"a line must have {expected} fields, as the first line has. Received: {start!r}."
    user, item, rating = (fields[place] for place in form.places)
    if not user or not item:
        return f"the user and the item must not be empty. Received: user={user!r}, item={item!r}."
    if not 0 < to_number(rating) <= limit:
        most = "" if limit == NO_LIMIT else f" and not above {limit:g}"
        return f"a rating must be a number above 0{most}. Received: {rating!r}."
    return ""
