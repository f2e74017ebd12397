"""HashEncoder: hash codes of the rows of a table, without a pass over the data."""

from __future__ import annotations

import dataclasses
import numbers
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_multigpu.sparse import settings
from keras_multigpu.sparse.cardinality import Cardinality
from keras_multigpu.sparse.code import BUCKETS, Layout, Place, find_splits, group_width
from keras_multigpu.sparse.hashing import TableHasher, find_distinct, hash_texts, to_multi_hot
from keras_multigpu.sparse.missing import MISSING, Missing
from keras_multigpu.sparse.tables import find_names, is_table, to_columns, to_texts


@dataclasses.dataclass(eq=False)
class HashEncoder:
    """Turns the rows of a table of categorical columns into multi-hot rows, by hashing.

    Nothing is learned: a value's indices depend only on its text, its column and the settings.
    Every chunk of every file gives the same indices on every machine. `keras_multigpu.sparse.code`
    describes the code, `keras_multigpu.sparse.tables` the text of a value.

    It is an estimator in the style of scikit-learn, with `fit`, `transform` and `get_params`, and
    works in pipelines; scikit-learn itself is not needed.

    Args:
        columns: how many values each column has, such as `{"city": 40_000, "age": 100}`, in the
            order of the row. Approximate numbers are enough. Where the number is `None`, and for
            a list of names or for no `columns` at all, `fit` estimates it.
        splits: how many ones a value has: 4, 2 or 1 (one-hot); `None` for the layout's number.
        collision_probability: the highest accepted probability that two values of a column share
            a code; `None` for the layout's own width, with which it is about 0.03 (`"wide"`) or
            0.39 (`"published"`).
        missing: the text that stands for a missing value.
        missing_values: the texts that are missing values, in files and tables alike, beside `None`,
            not-a-number and nulls. The empty text is one by default, because an empty field of a
            CSV file may be either; with `[]` it is a value. `"empty fields"` is the rule of
            earlier versions: the empty text is missing in a CSV file, and only there.
        output: the default form of `transform`: `"indices"`, `"csr"` or `"dense"`.
        others: `"error"` refuses a table with other columns, `"ignore"` leaves them out.
        num_threads: how many columns are hashed at a time.
        layout: how wide the row is. `"wide"`: two ones a value, and `buckets` indices in the row
            for each value of a column. A linear model of it is as good as one of `FeatureHasher`.
            `"published"`: four ones a value, and `4 * ceil(sqrt(n))` indices for a column of n
            values. The row is narrow, and a model of columns with many values is worse.
        buckets: how many indices a column has for each of its values, in the wide layout; `None`
            for 8. Fewer save memory.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> encoder = HashEncoder({"city": 40_000, "age": 100})
        >>> encoder.width, encoder.ones
        (320800, 4)
        >>> encoder.transform({"city": ["Rome", None], "age": [41, 41]})
        array([[114917, 305468, 320231, 320729],
               [157513, 229431, 320231, 320729]], dtype=int32)
        >>> encoder.explain(320729)
        Place(column='age', split=1, position=329)
    """

    # Kept as they are given: scikit-learn's `clone` requires it.
    columns: Mapping[str, int | None] | Sequence[str] | None = None
    splits: int | None = None
    collision_probability: float | None = None
    missing: str = MISSING
    output: str = "indices"
    others: str = "error"
    num_threads: int = 1
    layout: str = "wide"
    buckets: float | None = None
    missing_values: Sequence[str] | str = ("",)

    def __post_init__(self) -> None:
        """Checks the settings, forgets estimates, and lays out the row if nothing is missing."""
        settings.check(self.get_params())
        self._seen: dict[str, Cardinality] = {}
        self._layout: Layout | None = None
        self._missing = Missing.parse(self.missing, self.missing_values)
        self._given = settings.named_columns(self.columns)
        if self._given and None not in self._given.values():
            self._lay_out({name: count for name, count in self._given.items() if count})

    def _lay_out(self, cardinalities: dict[str, int]) -> None:
        self.cardinalities_ = cardinalities
        splits = find_splits(self.layout, self.splits)
        options = splits, self.layout, self.buckets, self.collision_probability
        groups = {name: group_width(count, *options) for name, count in cardinalities.items()}
        self._layout = Layout(groups, splits, self._missing)

    @property
    def is_ready(self) -> bool:
        """Whether all cardinalities are known."""
        return self._layout is not None

    @property
    def layout_(self) -> Layout:
        """Where each column has its indices; a `ValueError` before all cardinalities are known."""
        if self._layout is None:
            raise ValueError(
                "The cardinalities of the columns must be known. Received: "
                f"columns={self.columns!r}. Call `fit` on a table, or on a stream of tables."
            )
        return self._layout

    @property
    def width(self) -> int:
        """The number of columns of a multi-hot row."""
        return self.layout_.width

    @property
    def ones(self) -> int:
        """The number of ones in a row: `splits` for each column."""
        return self.layout_.ones

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, equal for encoders that give the same indices."""
        return self.layout_.fingerprint

    def fit(self, tables: Any, y: Any = None) -> HashEncoder:
        """Estimates the cardinalities that were not given, in bounded memory.

        Args:
            tables: a table, as for `transform`, or an iterable of tables, each read once.
            y: ignored.
        """
        self.__post_init__()
        is_stream = isinstance(tables, Iterable) and not isinstance(tables, (str, bytes))
        for table in tables if is_stream and not is_table(tables) else [tables]:
            self.partial_fit(table)
        self.layout_  # noqa: B018  refuses an iterable without tables
        return self

    def partial_fit(self, table: Any, y: Any = None) -> HashEncoder:
        """Adds the values of one more table to those seen since the last `fit`."""
        given = self._given or dict.fromkeys(find_names(table))
        columns = to_columns(table, list(given), others=self.others)
        self.feature_names_in_ = np.array(list(given), dtype=object)
        self.n_features_in_ = len(given)
        for name in (name for name, count in given.items() if count is None):
            seen = self._seen.setdefault(name, Cardinality())
            for chunk in columns[name].chunks:
                texts = to_texts(find_distinct(chunk))
                seen.add(np.delete(hash_texts(texts), self._missing.find(texts)))
        estimates = {name: max(1, seen.estimate()) for name, seen in self._seen.items()}
        self._given = given
        self._lay_out({name: count or estimates[name] for name, count in given.items()})
        return self

    def transform(self, table: Any, output: str | None = None) -> Any:
        """The rows of a table as multi-hot rows.

        Args:
            table: a pandas or polars DataFrame, a pyarrow Table, or a dict from names to arrays,
                with at least one row.
            output: `"indices"`: where the ones are, int32 of shape `(rows, ones)`, ascending in
                each row; `"csr"`: a SciPy CSR matrix, float32 of shape `(rows, width)`;
                `"dense"`: a NumPy array of that type and shape. `None` for the encoder's default.

        Raises:
            ValueError: if columns are missing or unknown, there are no rows, or cardinalities are
                not known yet.
            TypeError: if it is no table, or a column is of mixed types or holds no categories.
        """
        output = self.output if output is None else output
        settings.check_output(output)
        return to_multi_hot(self.stream()(table), self.width, output)

    def fit_transform(self, table: Any, y: Any = None) -> Any:
        """`fit`, then `transform`."""
        return self.fit(table).transform(table)

    def stream(self) -> Callable[[Any], np.ndarray]:
        """A function from a table to its indices, for many tables one after the other.

        It returns what `transform` returns. If a table has the same dictionary as the one before,
        as chunks of a Parquet file do, the dictionary is hashed once for both.
        """
        layout, others = self.layout_, self.others
        hasher = TableHasher(layout, int(self.num_threads))
        return lambda table: hasher(to_columns(table, list(layout.codes), others=others))

    def explain(self, index: int | str) -> Place | int:
        """What an index stands for; or the index of a name of `get_feature_names_out`.

        Raises:
            ValueError: if there is no such index or name.

        Example:
            >>> encoder = HashEncoder({"city": 100})
            >>> encoder.explain(403), encoder.explain(403).name
            (Place(column='city', split=1, position=3), 'city:1:3')
            >>> encoder.explain("city:1:3")
            403
        """
        if isinstance(index, str):
            return self.layout_.index(Place.parse(index))
        if not isinstance(index, numbers.Integral):
            raise ValueError(f"`index` must be an integer, or a name. Received: index={index!r}.")
        return self.layout_.place(int(index))

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The name of every index, in order."""
        names = [
            Place(column, split, position).name
            for column, code in self.layout_.codes.items()
            for split in range(code.splits)
            for position in range(code.group)
        ]
        return np.array(names, dtype=object)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings, by name."""
        return {name: getattr(self, name) for name in _NAMES}

    def set_params(self, **changes: Any) -> HashEncoder:
        """Changes settings, and forgets estimated cardinalities.

        Raises:
            ValueError: if a setting is unknown or invalid.
        """
        for name, value in changes.items():
            if name not in _NAMES:
                known = ", ".join(_NAMES)
                raise ValueError(
                    f"An encoder has the settings {known}. Received: {name}={value!r}."
                )
            setattr(self, name, value)
        self.__post_init__()
        return self

    def to_json(self) -> str:
        """The settings and the cardinalities as JSON, with the fingerprint."""
        fingerprint = self.fingerprint
        buckets = BUCKETS if self.buckets is None and self.layout == "wide" else self.buckets
        # Written out: another version may have other defaults.
        known = {"columns": self.cardinalities_, "splits": self.layout_.splits, "buckets": buckets}
        return settings.write({**self.get_params(), **known}, fingerprint)

    @classmethod
    def from_json(cls, text: str) -> HashEncoder:
        """The encoder that `to_json` described.

        Raises:
            ValueError: if the text is something else, or gives other indices than its fingerprint
                says.
        """
        content, fingerprint = settings.parse(text, _NAMES)
        encoder = cls(**content)
        if encoder.fingerprint != fingerprint:
            raise ValueError(
                "An encoder's settings must give the fingerprint that was saved with them. "
                f"Received: fingerprint={fingerprint!r}, and settings whose fingerprint is "
                f"{encoder.fingerprint!r}. The file was changed: use the one that was saved."
            )
        return encoder

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file."""
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HashEncoder:
        """Reads the encoder that `save` wrote."""
        return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of earlier versions lack what was the same for all encoders.
        self.__dict__.update({**settings.UNNAMED[1], **state})
        self._missing = Missing.parse(self.missing, self.missing_values)
        if self._layout is not None:
            self._lay_out(self.cardinalities_)

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_ready

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(string=True, categorical=True, allow_nan=True),
            requires_fit=False,
        )


_NAMES = [field.name for field in dataclasses.fields(HashEncoder)]


def copy_encoder(encoder: Any) -> HashEncoder:
    """An encoder with the same indices, which a later `fit` of the original doesn't change."""
    if not isinstance(encoder, HashEncoder):
        raise ValueError(
            "`encoder` must be a `keras_multigpu.sparse.HashEncoder`. "
            f"Received: encoder={encoder!r}."
        )
    return HashEncoder.from_json(encoder.to_json())
