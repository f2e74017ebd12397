"""Files that are replaced whole: a disk that is full leaves the one that was there."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import keras

from keras_multigpu.graphs.costs import variables_bytes

# HDF5 has groups and headers for each variable.
_BYTES_PER_VARIABLE = 4096
_BYTES_PER_FILE = 65536
# A disk, a user's share of it, a file's size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(filepath: Any, room: int = 0) -> Iterator[Any]:
    """Gives the path to write to, beside a file that takes its place when all is written.

    What is no path of this machine (an open file, `"gs://..."`), or of a kind that Keras refuses,
    is given as it is.

    Args:
        filepath: the file's path.
        room: how many bytes there must be room for before it is begun.

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
        _reserve(part, room)
        yield str(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        kept = " The file that was there before is as it was." if target.exists() else ""
        raise OSError(
            error.errno,
            f"`{target}` could not be written on the host {socket.gethostname()!r}: {error}."
            f"{kept} Make room on its disk, and go on from the last file that was written",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def weights_room(model: keras.Model) -> int:
    """About how many bytes a model's file of weights has; no fewer than it has.

    HDF5 ends the whole process where a disk is full in the midst of a file
    (h5py 3.14, a segmentation fault), so there has to be room before.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return variables_bytes(variables) + _BYTES_PER_VARIABLE * len(variables) + _BYTES_PER_FILE


def _reserve(path: pathlib.Path, room: int) -> None:
    """Refuses to begin where the disk has no room."""
    with path.open("wb") as file:
        if room and hasattr(os, "posix_fallocate"):  # not on every system
            os.posix_fallocate(file.fileno(), 0, room)
