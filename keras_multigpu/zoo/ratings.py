"""Files of ratings, such as MovieLens's, as one sparse matrix."""

from __future__ import annotations

import collections
import dataclasses
import os
from typing import Any, overload

import numpy as np
import pyarrow as pa
import scipy.sparse

from keras_multigpu.arguments import check_choice, finite_number, short
from keras_multigpu.sparse.lines import check_file, read_lines
from keras_multigpu.sparse.sources import BadDataError
from keras_multigpu.zoo.batches import RatingBatches, split_folds, split_share
from keras_multigpu.zoo.rating_lines import NO_LIMIT, Columns, find_form, parse


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
    limit = NO_LIMIT
    if highest is not None:
        limit = highest = finite_number("highest", highest, "a number above 0", lambda one: one > 0)
    form, parts = None, []
    for line, block in read_lines(path, verbose):
        form = form or find_form(path, block, skips)
        parts.append(parse(path, form, line, block, limit, skips))
    if not any(len(part.ratings) for part in parts):
        raise BadDataError(f"{path} must have at least one rating. Received: a file with none.")
    return _gather(parts, highest)


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """A sparse matrix of ratings; made by `read_ratings`.

    Args:
        matrix: the ratings divided by `highest`, a `scipy.sparse.csr_matrix` of float32 and of
            shape `(users, items)`. An item that is not in it has not been rated.
        users: the users, in the order of the rows: integers if all are written as integers, else
            the texts in the file (`034` is not an integer).
        items: the items, in the order of the columns.
        highest: the rating that is 1 in the matrix.
        skipped: how many lines were left out, by reason.
        repeated: how many ratings were replaced by a later one of the same user and item.

    Example:
        >>> matrix = scipy.sparse.csr_matrix(np.array([[0.2, 1.0], [0.0, 0.6]], "float32"))
        >>> ratings = Ratings(matrix, np.array([7, 8]), np.array([1, 2]), highest=5.0)
        >>> batches = ratings.batches(batch_size=1, shuffle=False, by="user", hide=0)
        >>> inputs, targets = batches[1]
        >>> inputs.tolist(), len(batches)
        ([[0.0, 0.6000000238418579]], 2)
    """

    matrix: Any
    users: np.ndarray
    items: np.ndarray
    highest: float
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    repeated: int = 0

    def __str__(self) -> str:
        rows, columns = self.matrix.shape
        return (
            f"{self.matrix.nnz:,} ratings of {columns:,} items by {rows:,} users, up to "
            f"{self.highest:g}; {sum(self.skipped.values()):,} skipped, {self.repeated:,} repeated"
        )

    @property
    def lowest(self) -> float:
        """The lowest rating that occurs; 0 if there are none."""
        return float(self.matrix.data.min()) * self.highest if self.matrix.nnz else 0.0

    def rows(self, by: str = "item") -> Any:
        """The ratings divided by `highest`, with a row for each item, or for each user.

        Args:
            by: `"item"` or `"user"`.
        """
        check_choice("by", by, "item", "user")
        return self.matrix.tocsr() if by == "user" else self.matrix.T.tocsr()

    def batches(
        self,
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        *,
        by: str = "item",
        hide: float = 0.5,
        targets: Ratings | None = None,
    ) -> RatingBatches:
        """Rows as inputs and as targets, to train an autoencoder.

        Args:
            batch_size: rows in a batch. Only the rows of a batch are ever dense.
            shuffle: draw another order of the rows for every epoch of `fit`.
            seed: the seed of that order, and of what is hidden.
            by: `"item"` for the ratings of an item as a row, `"user"` for those of a user.
            hide: the share of the ratings that the inputs lack in `fit`, drawn anew for every
                epoch; `evaluate` and `predict` see all.
            targets: ratings of the same users and items to predict from these, such as those held
                out by `split`: `fit(train.batches(), validation_data=train.batches(targets=test))`.
                `None` for these ratings.
        """
        goal = None
        if targets is not None:
            self._check_same_names(targets)
            goal = targets.rows(by) * (targets.highest / self.highest)
        return RatingBatches(self.rows(by), batch_size, shuffle, seed, hide=hide, targets=goal)

    @overload
    def split(self, share: float = 0.1, seed: int = 0) -> tuple[Ratings, Ratings]: ...

    @overload
    def split(self, *, folds: int, seed: int = 0) -> list[tuple[Ratings, Ratings]]: ...

    def split(self, share: float | None = None, seed: int = 0, *, folds: int | None = None) -> Any:
        """Ratings to train on, and ratings to test on, drawn at random.

        All parts keep all users and items: their rows and columns mean the same.

        Args:
            share: the part to test on; 0.1 without `folds`.
            seed: the seed of the draw.
            folds: cut the ratings into this many parts of equal size, and test on each in turn.

        Returns:
            `(train, test)`; with `folds`, a list of such pairs.

        Raises:
            ValueError: if an argument is invalid, or a part would have no ratings.
        """
        if share is not None and folds is not None:
            raise ValueError(
                f"`split` takes a share or folds. Received: share={share!r}, folds={folds!r}."
            )
        count = self.matrix.nnz
        if folds is None:
            pairs = [split_share(count, 0.1 if share is None else share, seed, "rating")]
        else:
            pairs = split_folds(count, folds, seed, "rating")
        found = [(self._take(train), self._take(test)) for train, test in pairs]
        return found[0] if folds is None else found

    def _take(self, numbers: np.ndarray) -> Ratings:
        """Some of the ratings, by their places in the matrix."""
        whole = self.matrix.tocoo()
        places = whole.row[numbers], whole.col[numbers]
        part = scipy.sparse.csr_matrix((whole.data[numbers], places), shape=whole.shape)
        return Ratings(part, self.users, self.items, self.highest)

    def _check_same_names(self, other: Ratings) -> None:
        for name in ("users", "items"):
            mine, others = getattr(self, name), getattr(other, name)
            if not np.array_equal(mine, others):
                raise ValueError(
                    f"`targets` must have the same {name}, in the same order, as parts of one "
                    f"`split` have. Received: {len(others)} {name} instead of {len(mine)}, or "
                    "others. For another file, use `evaluate_ratings`."
                )


def check_ratings(name: str, value: Any, hint: str = "") -> None:
    """Raises a `TypeError` if an argument is no `Ratings`."""
    if not isinstance(value, Ratings):
        raise TypeError(
            f"`{name}` must be `Ratings`, as `read_ratings` returns. Received: {short(value)}."
            + (f" {hint}" if hint else "")
        )


def _gather(parts: list[Columns], highest: float | None) -> Ratings:
    """The matrix of all blocks."""
    user_rows, users = _number([part.users for part in parts])
    item_columns, items = _number([part.items for part in parts])
    ratings = np.concatenate([part.ratings for part in parts])
    scale = float(ratings.max() if highest is None else highest)
    # The sort is stable: of equal pairs, the last in the file stays the last.
    keys = user_rows.astype("int64") * len(items) + item_columns
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_last = np.append(keys[1:] != keys[:-1], True)
    kept = order[is_last]
    values = (ratings[kept] / scale).astype("float32")
    matrix = scipy.sparse.csr_matrix(
        (values, (user_rows[kept], item_columns[kept])), shape=(len(users), len(items))
    )
    skipped: collections.Counter[str] = collections.Counter()
    skipped["another number of fields"] = sum(part.malformed for part in parts)
    skipped["no user, item or rating"] = sum(part.unusable for part in parts)
    return Ratings(matrix, users, items, scale, +skipped, len(ratings) - len(kept))


def _number(parts: list[pa.DictionaryArray]) -> tuple[np.ndarray, np.ndarray]:
    """For each line, the place of its value among the sorted distinct values; and these values."""
    column = pa.chunked_array(parts).unify_dictionaries().combine_chunks()
    values = _plain(column.dictionary)
    order = np.argsort(values, kind="stable")
    places = np.empty(len(order), "int32")
    places[order] = np.arange(len(order), dtype="int32")
    return places[column.indices.to_numpy()], values[order]


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
