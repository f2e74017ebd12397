"""The benchmark: one model on 1, 2, 4 devices, as a report that can be added to the docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import number_of
from keras_multigpu.devices import find_only_gpu, take_several
from keras_multigpu.reports import ScalingReport, scaling


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """A model and its data: `classes` labels for inputs of a shape."""

    build: Callable[[], keras.Model]
    shape: tuple[int, ...]
    classes: int
    batch_size: int


def _build_mlp() -> keras.Model:
    dense = keras.layers.Dense
    hidden = [dense(1024, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *hidden, dense(10)])


def _build_resnet50() -> keras.Model:
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


BENCHMARKS = {
    "mlp": _Benchmark(_build_mlp, (1024,), 10, 1024),
    "resnet50": _Benchmark(_build_resnet50, (224, 224, 3), 1000, 128),
}


_ONE_GPU = """\
This is the time on one GPU, where `make_parallel` leaves the step to Keras. A speed-up needs a
second GPU. `keras_multigpu.reports.advise` predicts from one GPU what several would gain.
`--devices 1 2 4` compares virtual CPU devices, whose times say nothing about GPUs.
"""


class _OneBatch(keras.utils.PyDataset):
    """The same batch again and again: reading data is not measured."""

    def __init__(self, batch: tuple[np.ndarray, np.ndarray], steps: int):
        super().__init__()
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        return self._batch


def run_bench(
    model: str | None = None,
    batch_size: int | None = None,
    devices: Sequence[int] | None = None,
    steps: int = 20,
    repeats: int = 3,
) -> ScalingReport:
    """Trains a model on 1, 2, 4 devices, and prints a report in Markdown.

    Args:
        model: `"mlp"` or `"resnet50"`; `None` for ResNet50 on GPUs, and else for the MLP.
        batch_size: rows of a batch, on all devices together; `None` for the model's usual size.
        devices: the numbers of devices; `None` for 1, 2, 4 and so on, and all that there are. A
            single GPU is timed alone. Without a GPU, or for more devices than a single GPU, virtual
            devices stand in.
        steps: batches of a run.
        repeats: timed runs on each number of devices.
    """
    chosen, which = take_several(max(devices) if devices else None, enough=1)
    counts = list(dict.fromkeys(devices or _counts(len(chosen))))
    print(which)
    model = model or ("resnet50" if chosen[0] in engines.current().list_devices("gpu") else "mlp")
    benchmark = BENCHMARKS[model]
    rows = batch_size or benchmark.batch_size
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, *benchmark.shape)).astype("float32")
    built = benchmark.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    data = _OneBatch((x, rng.integers(benchmark.classes, size=rows)), steps)
    report = scaling(built, data, counts, repeats=repeats)
    report.title = f"{model}, {number_of(rows, 'row')} of shape {benchmark.shape} in a batch"
    report.settings |= {"model": model, "batch size": rows, "steps of an epoch": steps}
    print(f"\n{report.to_markdown()}\n")
    if len(chosen) == 1 and find_only_gpu() in chosen:
        print(_ONE_GPU)
    if chosen[0] in engines.current().list_devices("gpu"):
        print("docs/speed.md has a place for reports: paste what is printed above, title included.")
    return report


def _counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})
