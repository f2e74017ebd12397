"""What is asked of a `HashedDataset`, checked before a file is opened."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from keras_multigpu.sparse.encoder import HashEncoder

_NO_DELIMITERS = '"\r\n\0'


def copy_encoder(encoder: Any) -> HashEncoder:
    """An encoder with the same indices, which later calls of `fit` of the given one don't change.

    Raises:
        ValueError: if it is no encoder, or its cardinalities are not known yet.
    """
    if not isinstance(encoder, HashEncoder):
        raise ValueError(
            "`encoder` must be a `keras_multigpu.sparse.HashEncoder`. "
            f"Received: encoder={encoder!r}."
        )
    return HashEncoder.from_json(encoder.to_json())


def number_columns(label: Any, weight: Any) -> tuple[str, ...]:
    """The columns of the labels, and behind them that of the weight.

    Raises:
        ValueError: if one is no name, is named twice, or there is a weight without a label.
    """
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


def check_numbers(**numbers: Any) -> None:
    """Refuses what is not a positive integer.

    Raises:
        ValueError: if one is not.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}.")


def check_choices(seed: Any, errors: Any, delimiter: Any, workers: Any) -> None:
    """Refuses settings that are not of their kind.

    Raises:
        ValueError: if one is not.
    """
    for name, value in {"seed": seed, "workers": workers}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"`{name}` must be an integer from 0 up. Received: {name}={value!r}.")
    if errors not in ("raise", "skip"):
        raise ValueError(f'`errors` must be "raise" or "skip". Received: errors={errors!r}.')
    is_character = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
    if not is_character or delimiter in _NO_DELIMITERS:
        raise ValueError(
            "`delimiter` must be one ASCII character, and no quotation mark, line end or NUL. "
            f"Received: delimiter={delimiter!r}."
        )


def check_process(process: Any, processes: int) -> None:
    """Refuses a process that is none of them.

    Raises:
        ValueError: if it is not.
    """
    if isinstance(process, bool) or process not in range(processes):
        raise ValueError(
            f"`process` must be an integer from 0 to {processes - 1}, one less than "
            f"`processes`. Received: process={process!r}."
        )


def is_shuffled(shuffle: Any, has_label: bool) -> bool:
    """Whether to shuffle; if not told, data with labels are.

    Raises:
        ValueError: if that is not what was given.

    Warns:
        UserWarning: if data without labels are to be shuffled.
    """
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
