"""The files of a data set: which they are, and how each is read."""

from __future__ import annotations

import glob
import os
from typing import Any

from keras_multigpu.sparse.csv_source import CsvSource
from keras_multigpu.sparse.parquet_source import ParquetSource
from keras_multigpu.sparse.sources import Schema, Source


def find_files(files: Any) -> list[str]:
    """Paths in order, with patterns replaced by what they match, sorted.

    A path that exists is no pattern, whatever characters are in it.

    Raises:
        ValueError: if a pattern matches nothing, or nothing is given.
    """
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
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


def make_source(path: str, schema: Schema, chunk_rows: int, skips: bool, delimiter: str) -> Source:
    """The source of a file, chosen by its name.

    Raises:
        ValueError: if the name tells no format that is known.
    """
    if path.endswith((".csv", ".csv.gz")):
        return CsvSource(path, schema, chunk_rows, skips, delimiter)
    if path.endswith((".parquet", ".pq")):
        return ParquetSource(path, schema, chunk_rows, skips)
    raise ValueError(
        f"Files must be named .csv, .csv.gz, .parquet or .pq. Received: {path!r}. Rename it, or "
        "convert it with pyarrow."
    )
