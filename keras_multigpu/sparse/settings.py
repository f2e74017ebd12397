"""The settings of an encoder: their checks, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.arguments import check_choice, finite_number, positive_integer
from keras_multigpu.sparse.code import check_cardinality, find_splits
from keras_multigpu.sparse.missing import EMPTY_FIELDS

_FORMAT = 3
# What the settings were that had no name in files of earlier formats.
UNNAMED: dict[Any, dict[str, Any]] = {
    1: {"layout": "published", "buckets": None, "missing_values": EMPTY_FIELDS},
    2: {"missing_values": EMPTY_FIELDS},
}


def check(settings: Mapping[str, Any]) -> None:
    """Refuses invalid settings; `named_columns` checks the columns."""
    layout, buckets = settings["layout"], settings["buckets"]
    find_splits(layout, settings["splits"])
    if buckets is not None and layout == "published":
        raise ValueError(
            "The published layout fixes the width of a column: leave `buckets` out. Received: "
            f"buckets={buckets!r}, layout={layout!r}."
        )
    if buckets is not None:
        expected = "a positive number, the indices that a column has for each of its values"
        finite_number("buckets", buckets, expected, lambda one: 0 < one < 2**30)
    if settings["collision_probability"] is not None:
        expected = (
            "a number between 0 and 1, the highest accepted probability that two values of a "
            "column share a code, or None for the layout's own width"
        )
        name = "collision_probability"
        finite_number(name, settings[name], expected, lambda one: 0 < one < 1)
    check_output(settings["output"])
    check_choice("others", settings["others"], "error", "ignore")
    positive_integer("num_threads", settings["num_threads"])


def check_output(output: Any) -> None:
    """Refuses a form of output that doesn't exist."""
    check_choice("output", output, "indices", "csr", "dense")


def named_columns(columns: Any) -> dict[str, int | None]:
    """The names in `columns`, with their cardinalities, or `None` where these are not known."""
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
                f"The names of columns must be strings. Received: columns with the name {name!r}. "
                "Rename the table's columns."
            )
        if cardinality is not None:
            given[name] = check_cardinality(cardinality, f"columns[{name!r}]")
    if len(given) < len(columns):
        raise ValueError(f"The names of columns must be different. Received: columns={columns!r}.")
    return given


def write(settings: Mapping[str, Any], fingerprint: str) -> str:
    """Settings as JSON, with the encoder's fingerprint."""
    content = {"format": _FORMAT, **settings, "fingerprint": fingerprint}
    return json.dumps(content, indent=1, ensure_ascii=False, default=lambda one: one.item())


def parse(text: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The settings and the fingerprint in the JSON that `write` returned."""
    try:
        content = dict(json.loads(text))
        fingerprint, number = content.pop("fingerprint"), content.pop("format")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "An encoder is loaded from the JSON that `to_json` or `save` wrote. "
            f"Received: {text[:60]!r}: {error!r}."
        ) from error
    if number in UNNAMED:
        content, number = {**content, **UNNAMED[number]}, _FORMAT
    if number != _FORMAT or set(content) != set(names):
        raise ValueError(
            f"An encoder's JSON has format {_FORMAT} and the settings {', '.join(names)}. "
            f"Received: format {number!r} and {', '.join(content)}. Another version of "
            "keras_multigpu wrote it: load it with that version."
        )
    return content, fingerprint
