"""The settings of an encoder and of a dataset: checks, the encoder's file, forms of its output."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_multigpu.arguments import as_integer, check_choice, positive_integer
from keras_multigpu.sparse.widths import (
    check_buckets,
    check_cardinality,
    check_probability,
    layout_splits,
)

_FORMAT = 2
# What the settings were called for that had no name in files of format 1.
_FORMAT_1 = {"layout": "published", "buckets": None}
_NO_DELIMITERS = '"\r\n\0'


def check(settings: Mapping[str, Any]) -> None:
    """Refuses invalid settings; `named_columns` checks the columns."""
    layout_splits(settings["layout"], settings["splits"])
    check_buckets(settings["buckets"], settings["layout"])
    check_probability(settings["collision_probability"])
    check_output(settings["output"])
    if not isinstance(settings["missing"], str):
        raise ValueError(
            "`missing` must be a string, the text that stands for a missing value. "
            f"Received: missing={settings['missing']!r}."
        )
    check_choice("others", settings["others"], "error", "ignore")
    positive_integer("num_threads", settings["num_threads"])


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
    if number == 1:
        content, number = {**content, **_FORMAT_1}, _FORMAT
    if number != _FORMAT or set(content) != set(names):
        raise ValueError(
            f"An encoder's JSON has format {_FORMAT} and the settings {', '.join(names)}. "
            f"Received: format {number!r} and {', '.join(content)}. Another version of "
            "keras_multigpu wrote it: load it with that version."
        )
    return content, fingerprint


def check_output(output: Any) -> None:
    """Refuses a form of output that doesn't exist."""
    check_choice("output", output, "indices", "csr", "dense")


def make_output(output: str, indices: np.ndarray, width: int) -> Any:
    """Multi-hot rows in one of the forms, from the indices of their ones."""
    if output == "indices":
        return indices
    rows, ones = indices.shape
    if output == "dense":
        dense = np.zeros((rows, width), "float32")
        np.put_along_axis(dense, indices, 1.0, axis=1)
        return dense
    from scipy.sparse import csr_matrix

    bounds = np.arange(rows + 1) * ones
    values = np.ones(indices.size, "float32")
    return csr_matrix((values, indices.ravel(), bounds), shape=(rows, width))


def number_columns(label: Any, weight: Any) -> tuple[str, ...]:
    """The columns of the labels, followed by that of the weight."""
    labels = [label] if isinstance(label, str) else label
    labels = [] if labels is None else labels
    if not isinstance(labels, Sequence) or not all(isinstance(name, str) for name in labels):
        raise ValueError(
            "`label` must be the name of a column, a list of names, or None. "
            f"Received: label={label!r}."
        )
    if weight is not None and not isinstance(weight, str):
        raise ValueError(
            f"`weight` must be the name of a column, or None. Received: weight={weight!r}."
        )
    names = (*labels, *([] if weight is None else [weight]))
    if len(set(names)) < len(names):
        raise ValueError(
            "The labels and the weight must be different columns. "
            f"Received: label={label!r}, weight={weight!r}."
        )
    if weight is not None and not labels:
        raise ValueError(
            f"`weight` needs a `label` to weigh. Received: label={label!r}, weight={weight!r}."
        )
    return names


def check_delimiter(delimiter: Any) -> None:
    """Refuses what can't stand between the fields of a CSV file."""
    is_character = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
    if not is_character or delimiter in _NO_DELIMITERS:
        raise ValueError(
            "`delimiter` must be one ASCII character, and no quotation mark, line end or NUL. "
            f"Received: delimiter={delimiter!r}."
        )


def process_number(process: Any, processes: int) -> int:
    """The number of one of several processes, as Python's integer."""
    number = as_integer(process)
    if number is None or not 0 <= number < processes:
        raise ValueError(
            f"`process` must be an integer from 0 to {processes - 1}, one less than "
            f"`processes`. Received: process={process!r}."
        )
    return number


def is_shuffled(shuffle: Any, has_label: bool) -> bool:
    """Whether to shuffle; by default, only data with labels."""
    if shuffle not in (None, True, False):
        raise ValueError(f"`shuffle` must be True, False or None. Received: shuffle={shuffle!r}.")
    if shuffle and not has_label:
        warnings.warn(
            "A dataset without labels is shuffled in `fit`, and where its batches are asked for "
            "one by one: these are not in the order of the files. `predict` and `evaluate` keep "
            f"that order. Received: shuffle={shuffle!r}, label=None. Leave `shuffle` out to keep "
            "it everywhere.",
            stacklevel=3,
        )
    return has_label if shuffle is None else bool(shuffle)
