"""Files that are replaced whole: a disk that is full leaves the one that was there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(filepath: Any) -> Iterator[Any]:
    """Gives the path to write to, beside a file that takes its place when all is written.

    What is no path of this machine (an open file, `"gs://..."`), or of a kind that Keras refuses,
    is given as it is.

    Args:
        filepath: the file's path.

    Raises:
        OSError: if it could not be written; a file that was there before is as it was.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    if "://" in path or not path.endswith((".weights.h5", ".keras")):
        yield filepath
        return
    target = pathlib.Path(os.path.realpath(filepath))
    part = target.with_name(f".{os.getpid()}.part.{target.name}")
    try:
        yield str(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except OSError as error:
        kept = " The file that was there before is as it was." if target.exists() else ""
        raise OSError(
            error.errno,
            f"`{target}` could not be written on the host {socket.gethostname()!r}: {error}."
            f"{kept} Make room on its disk, and go on from the last file that was written",
        ) from error
    finally:
        part.unlink(missing_ok=True)
