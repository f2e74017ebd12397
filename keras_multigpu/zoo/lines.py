"""Text files in blocks of whole lines, each with the number of its first line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.sources import BadDataError

_BLOCK_BYTES = 4 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_blocks(
    path: str, verbose: int = 0, size: int = _BLOCK_BYTES
) -> Iterator[tuple[int, bytes]]:
    r"""Some megabytes of a file at a time, cut where lines end.

    Args:
        path: the file; it is decompressed on the way if its name ends in `.gz`.
        verbose: 1 for a progress bar, 0 for silence.
        size: about how many bytes to read together.

    Yields:
        The number of the block's first line, from 1, and the block.

    Raises:
        BadDataError: if the file can't be read.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"one\ntwo\nthree")
        ...     file.flush()
        ...     list(read_blocks(file.name, size=5))
        [(1, b'one\n'), (2, b'two\n'), (3, b'three')]
    """
    bar = ReadingBar([path], verbose)
    line, kept = 1, b""
    try:
        with open(path, "rb") as raw, _decompressed(raw, path) as file:
            while more := file.read(size):
                bar.show(0, raw.tell())
                if line == 1 and not kept:
                    more = more.removeprefix(_BYTE_ORDER_MARK)
                kept += more
                end = kept.rfind(b"\n") + 1
                if end:
                    block, kept = kept[:end], kept[end:]
                    yield line, block
                    line += block.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise BadDataError(
            f"{path} must be a readable file. Received: {type(error).__name__}: {error}."
        ) from error
    if kept:
        yield line, kept
    bar.finish()


def check_path(path: Any) -> str:
    """A path as text.

    Raises:
        TypeError: if it is no path of one file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`path` must be the path of one file. Received: path={path!r}.")
    return os.fspath(path)


def check_errors(errors: Any) -> bool:
    """Whether bad lines are to be left out.

    Raises:
        ValueError: if that is not told.
    """
    if errors not in ("raise", "skip"):
        raise ValueError(f'`errors` must be "raise" or "skip". Received: errors={errors!r}.')
    return errors == "skip"


def _decompressed(raw: BinaryIO, path: str) -> Any:
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
