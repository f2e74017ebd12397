"""The settings of an encoder: what was asked for, and how it is written to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.sparse import outputs
from keras_multigpu.sparse.code import check_cardinality, check_splits
from keras_multigpu.sparse.collisions import check_probability

NAMES = (
    "columns",
    "splits",
    "collision_probability",
    "missing",
    "output",
    "others",
    "num_threads",
)
_FORMAT = 1


def write(settings: Mapping[str, Any], fingerprint: str) -> str:
    """Settings as JSON, with the encoder's fingerprint."""
    content = {"format": _FORMAT, **settings, "fingerprint": fingerprint}
    return json.dumps(content, indent=1, ensure_ascii=False, default=int)  # NumPy's integers


def parse(text: str) -> tuple[dict[str, Any], str]:
    """The settings and the fingerprint that `write` wrote.

    Raises:
        ValueError: if it did not write this.
    """
    try:
        content = dict(json.loads(text))
        fingerprint, number = content.pop("fingerprint"), content.pop("format")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "An encoder is loaded from the JSON that `to_json` or `save` wrote. "
            f"Received: {text[:60]!r}: {error!r}."
        ) from error
    if number != _FORMAT or set(content) != set(NAMES):
        raise ValueError(
            f"An encoder's JSON has format {_FORMAT} and the settings {', '.join(NAMES)}. "
            f"Received: format {number!r} and {', '.join(content)}. It was written by another "
            "version of keras_multigpu."
        )
    return content, fingerprint


def check(settings: Mapping[str, Any]) -> None:
    """Refuses settings, but for the columns, that are not of their kind.

    Raises:
        ValueError: if one is not.
    """
    check_splits(settings["splits"])
    if settings["collision_probability"] is not None:
        check_probability(settings["collision_probability"])
    outputs.check(settings["output"])
    missing, others, threads = (settings[name] for name in ("missing", "others", "num_threads"))
    if not isinstance(missing, str):
        raise ValueError(
            "`missing` must be a string, the text that stands for a missing value. "
            f"Received: missing={missing!r}."
        )
    if others not in ("error", "ignore"):
        raise ValueError(f'`others` must be "error" or "ignore". Received: others={others!r}.')
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(
            f"`num_threads` must be a positive integer. Received: num_threads={threads!r}."
        )


def named_columns(columns: Any) -> dict[str, int | None]:
    """The columns that were named, with the cardinalities that are known, else `None`.

    Raises:
        ValueError: if that is not what was given.
    """
    if columns is None:
        return {}
    is_names = isinstance(columns, Sequence) and not isinstance(columns, (str, bytes))
    if (not isinstance(columns, Mapping) and not is_names) or not columns:
        raise ValueError(
            "`columns` must be a dict from the names of columns to their cardinalities, a list of "
            f"names, or None. Received: columns={columns!r}."
        )
    given = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    for name, cardinality in given.items():
        if not isinstance(name, str):
            raise ValueError(
                f"Columns are named by strings. Received: columns with the name {name!r}. Rename "
                "the table's columns."
            )
        if cardinality is not None:
            check_cardinality(cardinality, f"columns[{name!r}]")
            given[name] = int(cardinality)
    if len(given) < len(columns):
        raise ValueError(f"Each column is named once. Received: columns={columns!r}.")
    return given
