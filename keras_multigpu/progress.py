"""What is told while something takes long: a bar for reading files, a line for a first step."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras

_MEGABYTE = 10**6
_LONG = 10.0  # seconds


class ReadingBar:
    """A progress bar over the megabytes of files on the disk, which are read in this order.

    Missing files count as empty; the reader reports them. `verbose` is 1 for a bar, 0 for none.

    Example:
        >>> bar = ReadingBar([__file__], verbose=0)
        >>> bar.show(0, 1000)
        >>> bar.finish()
        >>> bar.total > 1000
        True
    """

    def __init__(self, paths: Sequence[str], verbose: int = 1):
        if verbose not in (0, 1):
            raise ValueError(f"`verbose` must be 0 or 1. Received: verbose={verbose!r}.")
        sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
        self._before = [sum(sizes[:number]) for number in range(len(sizes))]
        self.total = sum(sizes)
        self._bar = keras.utils.Progbar(
            max(math.ceil(self.total / _MEGABYTE), 1), verbose=verbose, unit_name="MB"
        )

    def show(self, file: int, position: int) -> None:
        """Shows that the reading is at byte `position` of a file, given by its number."""
        read = self._before[file] + position
        # A full bar ends its line; only `finish` may do that.
        self._bar.update(min(int(read / _MEGABYTE), self._bar.target - 1))

    def finish(self) -> None:
        """Fills the bar and ends its line."""
        self._bar.update(self._bar.target, finalize=True)


def with_first_told(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """A function whose first call is told if it takes long: it traces and compiles a step.

    Keras shows no progress bar yet during a first step, so that the line disturbs none.

    Example:
        >>> with_first_told(abs, "This will not be told.")(-1)
        1
    """
    is_first = True

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return function(*args, **kwargs)
        timer = threading.Timer(_LONG, lambda: sys.stderr.write(f"{text}\n"))
        timer.daemon = True
        timer.start()
        try:
            result = function(*args, **kwargs)
        finally:
            timer.cancel()
        is_first = False
        return result

    return told
