"""Which of Keras's loops is asking for data: `fit`, `evaluate` or `predict`.

Keras doesn't tell a dataset, and only `fit` may shuffle. It calls the dataset's hooks from the
loop itself, so that the loop is among the callers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import keras

_LOOPS = ("fit", "evaluate", "predict")


def running_loops() -> list[tuple[str, Any]]:
    """The loops among the callers, the innermost first, each with the data that it reads.

    `fit` has an `evaluate` inside while it validates.
    """
    names = _codes()
    return [
        (names[frame.f_code], frame.f_locals.get("x"))
        for frame in _callers()
        if frame.f_code in names
    ]


def is_reset() -> bool:
    """Whether Keras ends an epoch only to begin anew: called in `on_epoch_end`.

    Keras may take a batch to build the model. Then it resets its iterator, by a method of this
    name, and the epoch begins with its first batch again.
    """
    loops = _codes()
    inside = itertools.takewhile(lambda frame: frame.f_code not in loops, _callers())
    return bool(running_loops()) and any(frame.f_code.co_name == "reset" for frame in inside)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _codes() -> dict[CodeType, str]:
    """The loops by their code, under what Keras wraps around them."""
    return {inspect.unwrap(getattr(keras.Model, name)).__code__: name for name in _LOOPS}
