"""How each run of a scaling report trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from keras_multigpu.reports.checks import check_count
from keras_multigpu.reports.timing import Stopwatch

_KERAS_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How each run trains; a plan that exists was checked.

    Args:
        data: a tuple of inputs, targets and sample weights, or what else `fit` takes as `x`.
        batch_size: rows of a batch; `None` where the data come in batches.
        epochs: how many a run trains for.
        steps: batches of an epoch; `None` for all.
        warm_up: how many epochs go before the runs that are timed.
        repeats: how many runs on each number of devices are timed.
        weak: whether `batch_size` is that of each device, and not of all together.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if the data can be read only once.
    """

    data: Any
    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    warm_up: int = 1
    repeats: int = 3
    weak: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterator):
            raise TypeError(
                "`data` must be something that every run can read from its start: arrays, a "
                f"`tf.data.Dataset` or a `keras.utils.PyDataset`. Received: data={self.data!r}, "
                "which can be read once. Make a Dataset or a PyDataset of it."
            )
        if isinstance(self.data, tuple) and not 1 <= len(self.data) <= 3:
            raise ValueError(
                "`data` must be a tuple of inputs, targets and sample weights, or a source of "
                f"batches. Received: a tuple of {len(self.data)}. Put several inputs into a list: "
                "`([a, b], y)`."
            )
        if self.data is None or isinstance(self.data, (list, dict)) or hasattr(self.data, "shape"):
            raise ValueError(
                "`data` must be a tuple of inputs, targets and sample weights, or a source of "
                f"batches. Received: data of type {type(self.data).__name__}. Give `(x, y)`."
            )
        if self.weak and self.batch_size is None:
            raise ValueError(
                "`weak=True` needs the rows of each device. Received: batch_size=None. Give "
                "`batch_size`, and arrays as `data`."
            )
        for name in ("batch_size", "steps"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("epochs", self.epochs)
        check_count("warm_up", self.warm_up, least=0)
        check_count("repeats", self.repeats)

    def batch_size_on(self, devices: int) -> int | None:
        """Rows of a batch on a number of devices; `None` where the data decide."""
        size = self.batch_size
        if size is None and isinstance(self.data, tuple):
            size = _KERAS_BATCH_SIZE
        return size * devices if self.weak and size else size

    def fit(self, model: keras.Model, epochs: int) -> tuple[keras.callbacks.History, Stopwatch]:
        """Trains a parallel model for some epochs, on the rows in their own order.

        Returns:
            What `fit` returns, and the times of epochs and steps.
        """
        watch = Stopwatch()
        x, *others = self.data if isinstance(self.data, tuple) else (self.data,)
        given = dict(zip(("y", "sample_weight"), others))
        if self.batch_size is not None:
            given["batch_size"] = self.batch_size_on(len(model.devices))
        given = {name: value for name, value in given.items() if value is not None}
        history = model.fit(
            x,
            **given,
            epochs=epochs,
            steps_per_epoch=self.steps,
            shuffle=False,
            callbacks=[watch],
            verbose=0,
        )
        return history, watch

    def describe(self) -> dict[str, Any]:
        """What a reader of the figures must know."""
        found = {
            "batch size": self.batch_size_on(1) or "the data's own",
            "epochs": self.epochs,
            "steps of an epoch": self.steps or "all",
            "warm-up": f"{self.warm_up} epoch{'' if self.warm_up == 1 else 's'}",
            "repeats": f"{self.repeats}, in turn",
        }
        return found | (
            {"scaling": "weak, the batch size is that of a device"} if self.weak else {}
        )
