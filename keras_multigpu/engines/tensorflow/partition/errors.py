"""Errors of a step while it runs: told once, where the user's code made the operation.

TensorFlow tells each device's error, and where this library has written the operation.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.planner import Record

_OURS = str(pathlib.Path(__file__).parents[3])
_NODE = re.compile(r"{{node ([^}]+)}}")
_FIRST_OF_SEVERAL = re.compile(
    r"^ +\(0\) [A-Z_]+: +(.*?)\n(?:\t| +\(\d+\) |\d+ successful)", re.M | re.S
)
_ONLY = re.compile(r".*\nNode: [^\n]*\n(.*?)\n\t", re.S)


@contextlib.contextmanager
def told_once(find_records: Callable[[], Iterable[Record]]) -> Iterator[None]:
    """Scope in which steps run whose operations have records."""
    try:
        yield
    except tf.errors.OpError as error:
        text = _at_origin(str(error.message), find_records())
        if text is None:
            raise
        told = type(error)(error.node_def, error.op, text)
        raise told.with_traceback(error.__traceback__) from None


def _at_origin(message: str, records: Iterable[Record]) -> str | None:
    """The first error in a message, and where its operation comes from; `None` if unknown."""
    known = {record.name: record.stack for record in records}
    names = (re.sub(r"_\d+$", "", name) if name not in known else name for name in _names(message))
    name = next((one for one in names if known.get(one) is not None), None)
    found = _FIRST_OF_SEVERAL.search(message) or _ONLY.match(message)
    if name is None or found is None:
        return None
    frames = [frame for frame in known[name] if not frame.filename.startswith(_OURS)]
    lines = "".join(traceback.format_list(frames))
    return (
        f"Graph execution error:\n\nDetected at node {name!r} defined at (most recent call last):\n"
        f"{lines}Node: {name!r}\n{found[1].strip()}"
    )


def _names(message: str) -> list[str]:
    """The operations that a message names, without the functions that they are in."""
    return [name for full in _NODE.findall(message) for name in _endings(full)]


def _endings(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[place:]) for place in range(len(parts))]
