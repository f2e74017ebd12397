"""Files of ratings, such as MovieLens's: their form, their lines, and their errors."""

from __future__ import annotations

import collections
import csv
import os
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import scipy.sparse

from keras_multigpu.arguments import finite_number
from keras_multigpu.sparse.lines import check_file, explain_line, read_fields, read_lines
from keras_multigpu.sparse.sources import BadDataError, to_number, to_numbers
from keras_multigpu.zoo.ratings import Ratings

_COLUMNS = ("user", "item", "rating")
_NAMES = {
    "user": ("user", "userid", "reviewerid"),
    "item": ("item", "itemid", "movie", "movieid", "asin", "parentasin", "productid"),
    "rating": ("rating", "overall", "score"),
}
# Delimiters of Arrow are one character: `::` is read as `:` with an empty field after it.
_DELIMITERS = {"::": ":", "\t": "\t", ",": ",", ";": ";"}
_HEADER = re.compile(rb"\s*[^\n]*\n?")  # blank lines may come first
_NO_LIMIT = float(np.finfo("float64").max)


def read_ratings(
    path: str | os.PathLike[str],
    *,
    highest: float | None = None,
    errors: str = "raise",
    verbose: int = 1,
) -> Ratings:
    r"""Reads a file of ratings.

    The first line shows the form, which may be one of MovieLens's: `u.data` (tabs), `ratings.dat`
    (`::`), `ratings.csv`, or tabs with a header. A file whose name ends in `.gz` is decompressed.
    Columns other than the user, the item and the rating are ignored. The file is read some
    megabytes at a time; only the ratings stay in memory, as numbers. If a user has rated an item
    several times, the last rating in the file counts.

    Args:
        path: the file.
        highest: the highest possible rating, which scales ratings to [0, 1]; a line with a higher
            one is bad. `None` for the highest rating in the file.
        errors: `"raise"`, or `"skip"` to leave out and count lines with too few or too many
            fields, and lines whose rating is not a number above 0.
        verbose: 1 for a progress bar, 0 for silence.

    Returns:
        The ratings.

    Raises:
        ValueError: if an argument is invalid, or the file can't be read or has no ratings; and,
            unless errors are skipped, for the first bad line, with its number.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "u.data")
        >>> with open(path, "w") as file:
        ...     _ = file.write("196\t242\t3\t8812509\n186\t302\t4\t8917177\n196\t302\tfive\t0\n")
        >>> ratings = read_ratings(path, highest=5, errors="skip", verbose=0)
        >>> print(ratings)
        2 ratings of 2 items by 2 users, up to 5; 1 skipped, 0 repeated
        >>> ratings.matrix.toarray().tolist(), ratings.users.tolist()
        ([[0.0, 0.800000011920929], [0.6000000238418579, 0.0]], [186, 196])
    """
    path, skips = check_file(path, errors)
    limit = _NO_LIMIT
    if highest is not None:
        limit = highest = finite_number("highest", highest, "a number above 0", lambda one: one > 0)
    form, parts = None, []
    skipped: collections.Counter[str] = collections.Counter()
    for line, block in read_lines(path, verbose):
        form = form or _find_form(path, block, skips)
        parts.append(_parse(path, form, line, block, limit, skipped if skips else None))
    if not any(map(len, parts)):
        raise BadDataError(f"{path} must have at least one rating. Received: a file with none.")
    return _gather(pa.concat_tables(parts), highest, +skipped)


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


def _find_form(path: str, block: bytes, skips: bool) -> Form:
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


def _parse(
    path: str,
    form: Form,
    line: int,
    data: bytes,
    limit: float,
    skipped: collections.Counter[str] | None,
) -> pa.Table:
    """The good lines of a block that begins with line number `line`: user, item and rating.

    Users and items are dictionaries of what is written. Ratings above `limit` are bad. Bad lines
    are counted in `skipped`; if that is `None`, the first one is a `BadDataError`.
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
    users, items, written = table.columns
    ratings = to_numbers(written)
    is_good = (ratings > 0) & (ratings <= limit)
    is_good &= ~np.asarray(users.is_null()) & ~np.asarray(items.is_null())
    malformed = len(found) + data.count(b"\n") - kept.count(b"\n")
    if skipped is not None:
        skipped["another number of fields"] += malformed
        skipped["no user, item or rating"] += int((~is_good).sum())
    elif malformed or not is_good.all():
        raise _first_bad(path, form, line, data, limit)
    names = [column.filter(pa.array(is_good)).dictionary_encode() for column in (users, items)]
    return pa.table([*names, pa.array(ratings[is_good])], list(_COLUMNS))


def _drop_open(form: Form, data: bytes) -> bytes:
    """The lines without those that have an open quote, which would swallow the next lines."""
    if form.delimiter != "," or b'"' not in data:
        return data
    return b"\n".join(line for line in data.split(b"\n") if not line.count(b'"') % 2)


def _first_bad(path: str, form: Form, first: int, data: bytes, limit: float) -> BadDataError:
    """The error for the first bad line of a block, whose lines are read again one by one."""
    for number, line in enumerate(data.split(b"\n"), first):
        if line.rstrip(b"\r") and (problem := _find_problem(form, line, limit)):
            return explain_line(path, number, problem)
    return explain_line(path, first, "a number in these lines can't be read.")


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
        most = "" if limit == _NO_LIMIT else f" and not above {limit:g}"
        return f"a rating must be a number above 0{most}. Received: {rating!r}."
    return ""


def _gather(table: pa.Table, highest: float | None, skipped: collections.Counter[str]) -> Ratings:
    """The matrix of all lines."""
    (rows, users), (columns, items) = (_number(table.column(name)) for name in ("user", "item"))
    ratings = table.column("rating").to_numpy()
    scale = float(ratings.max() if highest is None else highest)
    keys = rows.astype("int64") * len(items) + columns
    # Of equal pairs, the last one in the file counts.
    kept = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
    values = (ratings[kept] / scale).astype("float32")
    matrix = scipy.sparse.csr_matrix(
        (values, (rows[kept], columns[kept])), shape=(len(users), len(items))
    )
    return Ratings(matrix, users, items, scale, skipped, len(ratings) - len(kept))


def _number(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """For each line, the place of its value among the sorted distinct values; and these values."""
    encoded = column.unify_dictionaries().combine_chunks()
    values, places = np.unique(_plain(encoded.dictionary), return_inverse=True)
    return places.astype("int32")[encoded.indices.to_numpy()], values


def _plain(dictionary: pa.Array) -> np.ndarray:
    """Integers if all values are written as integers, else texts, so that no value changes.

    Bytes that are not UTF-8 become surrogates, as in Python's file names.
    """
    names = [value.decode("utf-8", "surrogateescape") for value in dictionary.to_pylist()]
    texts = np.array(names)
    if texts.tolist() != names:  # NumPy cuts off NULs at the end
        return np.array(names, dtype=object)
    try:
        numbers = texts.astype("int64")
    except (ValueError, OverflowError):
        return texts
    # "7" and "07" are two names, "1_0" is not 10.
    return numbers if [str(number) for number in numbers.tolist()] == names else texts
