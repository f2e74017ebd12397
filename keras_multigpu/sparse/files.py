"""The files of a data set: their names, and what reads them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any

from keras_multigpu.arguments import check_choice, positive_integer
from keras_multigpu.sparse.csv_source import CsvSource
from keras_multigpu.sparse.parquet_source import ParquetSource
from keras_multigpu.sparse.sources import Schema, Source

_NO_DELIMITERS = '"\r\n\0'


def make_sources(
    files: Any, schema: Schema, chunk_rows: int, errors: str, delimiter: str
) -> list[Source]:
    """The readers of the files."""
    chunk_rows = positive_integer("chunk_rows", chunk_rows)
    check_choice("errors", errors, "raise", "skip")
    _check_delimiter(delimiter)
    options = schema, chunk_rows, errors == "skip"
    sources: list[Source] = []
    for path in _find_files(files):
        if path.endswith((".csv", ".csv.gz")):
            sources.append(CsvSource(path, *options, delimiter))
        elif path.endswith((".parquet", ".pq")):
            sources.append(ParquetSource(path, *options))
        else:
            raise ValueError(
                f"Files must be named .csv, .csv.gz, .parquet or .pq. Received: {path!r}. Rename "
                "it, or convert it with pyarrow."
            )
    return sources


def _find_files(files: Any) -> list[str]:
    """Paths, with the sorted matches of patterns; a path that exists is no pattern."""
    given = [files] if isinstance(files, (str, os.PathLike)) else files
    is_table = isinstance(given, Mapping) or hasattr(given, "columns")
    if is_table or not isinstance(given, Iterable) or isinstance(given, bytes):
        cure = "Use `encoder.transform(table)`" if is_table else "Give `'data/*.csv'`, for example"
        raise TypeError(
            "`files` must be a path, a pattern, or a list of them. Received: files of type "
            f"{type(files).__name__}. {cure}."
        )
    found: list[str] = []
    for path in [os.fspath(one) for one in given]:
        is_pattern = glob.has_magic(path) and not os.path.lexists(path)
        matches = sorted(glob.glob(path)) if is_pattern else [path]
        if not matches:
            raise ValueError(
                f"A pattern must match files. Received: {path!r}, which matches none, and no file "
                "has this name."
            )
        found += matches
    if not found:
        raise ValueError(f"`files` must name at least one file. Received: files={files!r}.")
    return found


def _check_delimiter(delimiter: Any) -> None:
    """Refuses what can't stand between the fields of a CSV file."""
    is_character = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
    if not is_character or delimiter in _NO_DELIMITERS:
        raise ValueError(
            "`delimiter` must be one ASCII character, and no quotation mark, line end or NUL. "
            f"Received: delimiter={delimiter!r}."
        )
