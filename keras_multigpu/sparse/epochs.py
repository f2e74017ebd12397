"""Batches whose order changes from epoch to epoch, however Keras asks for them.

Only `fit` may shuffle, but Keras doesn't tell a dataset which loop is reading it: `fit`,
`evaluate` or `predict`. Keras calls the dataset's hooks from the loop itself, so the loop is found
among the callers.
"""

from __future__ import annotations

import abc
import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import keras

from keras_multigpu.arguments import non_negative_integer

_LOOPS = ("fit", "evaluate", "predict")


def _fixed(name: str, value: Any, doc: str) -> property:
    """A setting of `PyDataset` that Keras always reads as `value`, whatever was asked for."""

    def put(self: EpochDataset, asked: Any) -> None:
        setattr(self, f"_{name}", asked)
        self._open_reader()

    return property(lambda self: value, put, doc=doc)


class EpochDataset(keras.utils.PyDataset, abc.ABC):
    """A dataset that shuffles itself in `fit` and keeps its order elsewhere; abstract.

    Keras asks for batches by number, from other threads, ahead of the step that takes them, and
    for some of them only to look at them. An epoch has ended when all of its batches were asked
    for since the iterator was made. Requests before that, to build the model, don't count.

    Keras must not start workers: its queue begins before the epoch does, loses batches when it
    stops, and copies this object with its open files into other processes.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._start = 0  # the first batch of this epoch of Keras, counted from the first epoch
        self._asked: set[int] | None = None  # since the iterator was made; None: nothing counts
        self._is_done = self._is_in_order = False
        self._begin_process()

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch."""

    @abc.abstractmethod
    def _make_batch(self, epoch: int | None, number: int) -> tuple[Any, ...]:
        """A batch of an epoch; if the epoch is `None`, of the data in their own order."""

    def _open_reader(self) -> None:
        """Makes what reads the data, with the workers that were asked for, in this process."""

    def _begin_reading(self) -> None:
        """Called before an epoch is read."""

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._start // len(self)

    workers = _fixed("workers", 1, "Always 1: Keras then asks for the batches itself, in order.")
    use_multiprocessing = _fixed(
        "use_multiprocessing", False, "Always False: Keras then asks for the batches itself."
    )

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"A batch's number must be from 0 to {len(self) - 1}. Received: index={index}."
            )
        with self._own_lock():
            if self._is_in_order:
                return self._make_batch(None, index)
            if self._asked is not None:
                self._asked.add(index)
            return self._make_batch(*divmod(self._start + index, len(self)))

    def on_epoch_begin(self) -> None:
        """Moves to the next epoch if all batches of this one were asked for.

        Raises:
            ValueError: if `fit` is in the middle of an epoch of this object, and `evaluate` or
                `predict` begins to read it too.
        """
        self._begin_reading()
        loops, _ = find_loops()
        self._check_free(loops)
        with self._own_lock():
            self._is_in_order = bool(loops) and loops[0][0] != "fit"
            if self._is_in_order:
                return
            if self._is_done or self._is_complete:
                self._start += len(self)
                self._is_done = False
                self._asked = set()
            self._asked = self._asked or set()

    def on_epoch_end(self) -> None:
        """Notes whether all batches were asked for; outside of Keras's loops, moves on."""
        self._begin_reading()  # Keras may now look at the first batches
        loops, is_reset = find_loops()
        self._check_free(loops)
        with self._own_lock():
            if not loops:
                self._start += len(self)
                self._asked = None
            elif is_reset:
                self._asked = None
            elif not self._is_in_order and self._is_complete:
                self._is_done, self._asked = True, None
            self._is_in_order = False

    def resume(self, epoch: int, batch: int = 0) -> None:
        """Goes to a batch of an epoch, to continue a training, without reading those before it.

        With the same data, seed and batch size, the batches are the ones that would have followed.
        An epoch of Keras still has all its batches: it begins with the rest of the interrupted
        epoch, and ends in the middle of the next one.

        Args:
            epoch: the number of the epoch, from 0.
            batch: how many of its batches are done.

        Raises:
            ValueError: if there is no such batch.
        """
        epoch, batch = non_negative_integer("epoch", epoch), non_negative_integer("batch", batch)
        if batch >= len(self):
            raise ValueError(
                f"An epoch has batches 0 to {len(self) - 1}. "
                f"Received: epoch={epoch}, batch={batch}."
            )
        self._begin_reading()
        with self._own_lock():
            self._start = epoch * len(self) + batch
            self._asked, self._is_done = None, False

    def _stream(self) -> Iterator[tuple[Any, ...]]:
        """The batches of the current epoch; the next stream has the next epoch's."""
        start = self._start
        for number in range(len(self)):
            with self._own_lock():
                batch = self._make_batch(*divmod(start + number, len(self)))
                if number == len(self) - 1 and self._start == start:
                    self._start += len(self)
            yield batch

    @property
    def _is_complete(self) -> bool:
        return self._asked is not None and len(self._asked) == len(self)

    def _check_free(self, loops: list[tuple[str, Any]]) -> None:
        """Refuses a second reader, whose requests can't be told apart from the first one's."""
        is_inside = any(name == "fit" and data is self for name, data in loops[1:])
        if is_inside and self._asked:
            raise ValueError(
                f"A dataset is read by one loop at a time. Received: `{loops[0][0]}` of the same "
                "dataset that `fit` is in the middle of. Give it another dataset: "
                "`copy.deepcopy(data)`."
            )

    def _begin_process(self) -> None:
        """Makes what this object has for itself: at first, as a copy, and in a forked process."""
        self._lock, self._process_id = threading.RLock(), os.getpid()
        self._open_reader()

    def _own_lock(self) -> threading.RLock:
        if self._process_id != os.getpid():
            self._begin_process()  # nobody may ever release the parent's lock
        return self._lock

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_asked": None, "_is_in_order": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()


def find_loops() -> tuple[list[tuple[str, Any]], bool]:
    """The loops among the callers, the innermost first, and whether Keras only begins anew.

    Each loop comes with the data that it reads; `fit` contains an `evaluate` while it validates.
    Keras may take a batch to build the model. Then it resets its iterator, with a method called
    `reset`, which ends an epoch that begins again with its first batch.
    """
    names, loops, is_reset = _find_loop_code(), [], False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in names:
            loops.append((names[frame.f_code], frame.f_locals.get("x")))
        elif not loops:
            is_reset |= frame.f_code.co_name == "reset"
        frame = frame.f_back
    return loops, is_reset and bool(loops)


@functools.cache
def _find_loop_code() -> dict[CodeType, str]:
    """The names of the loops by their code, without Keras's wrappers."""
    return {inspect.unwrap(getattr(keras.Model, name)).__code__: name for name in _LOOPS}
