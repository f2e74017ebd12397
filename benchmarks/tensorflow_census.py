"""Which operations of Keras's training steps are spread, and what is computed whole.

    python -m benchmarks.tensorflow_census layers losses metrics optimizers applications

Steps of small models on three virtual devices, in float64, against one device, with batches of 7,
2 and 4 rows. Those of all `keras.applications` are only planned, for images of their own sizes: the
command fails if one device computes more than 2% of such a step.

    python -m benchmarks.tensorflow_census applications ResNet50 VGG16
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import inspect
import multiprocessing
import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import benchmarks.tensorflow_census_cases as cases
from benchmarks.tensorflow_census_models import head, head_rows, model, rows
from keras_multigpu import use_virtual_devices
from keras_multigpu.engines.tensorflow.partition.constants import EVALUATE, WITH_SHAPES
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.step import spread

L = keras.layers
DEVICES = ["/CPU:0", "/CPU:1", "/CPU:2"]
BATCHES = (7, 2, 4)
LIMIT = 2.0  # percent of an application's step that one device may compute


class Totals:
    """What was met of all steps."""

    def __init__(self) -> None:
        self.results: collections.Counter[str] = collections.Counter()
        self.types: collections.Counter[str] = collections.Counter()
        self.gathered: collections.Counter[str] = collections.Counter()

    def add(self, name: str, records: Any, result: str, seconds: float) -> float:
        """Notes and prints a step. Returns the percentage that one device computes."""
        self.results[result.split()[0]] += 1
        work = collections.Counter[str]()
        gathered = collections.Counter(one.type for one in records if one.how == "gathered")
        for one in records:
            work[one.how] += one.work
            self.types[one.type] += 1
        self.gathered.update(gathered)
        total = sum(work.values()) or 1
        gone, whole = (100 * work[how] / total for how in ("gathered", "whole"))
        shares = f"gathered {gone:.2f}%, whole {whole:.2f}%"
        print(
            f"{name:36s} {result:11s} {shares} {dict(gathered) or ''} {seconds:.1f} s", flush=True
        )
        return 100 - 100 * work["spread"] / total

    def show(self) -> None:
        """Prints the sums."""
        print(dict(self.results))
        known = {*RULES, *EVALUATE, *WITH_SHAPES, "Const"}
        without = {one: n for one, n in self.types.items() if one not in known}
        print(f"{len(self.types)} types of operations, {len(without)} without a rule: {without}")
        print(
            "gathered though there is a rule:",
            {k: n for k, n in self.gathered.items() if k in RULES},
        )


def compare(make: Any, batch_of: Any, limit: float) -> tuple[str, Any]:
    """The largest difference after three steps, and the records."""
    keras.backend.clear_session()
    plain, ours = make(), make()
    for one in (plain, ours):
        one.optimizer.build(one.trainable_variables)
        one._symbolic_build(data_batch=batch_of(2))
    records: list[Any] = []

    def step(data: Any) -> Any:
        records.clear()
        return spread(ours.train_step, (data,), DEVICES, records=records)

    specs = [
        tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in map(tf.constant, batch_of(2))
    ]
    steps = [tf.function(plain.train_step, autograph=False, reduce_retracing=True)]
    worst = 0.0
    try:
        for batch in BATCHES:
            steps[0](tuple(map(tf.constant, batch_of(batch))))
    except Exception as error:
        return f"not-on-one-device {type(error).__name__}", records
    steps.append(tf.function(step, autograph=False, input_signature=[tuple(specs)]))
    for batch in BATCHES:
        steps[1](tuple(map(tf.constant, batch_of(batch))))
    for one, other in zip(_state(plain), _state(ours)):
        difference = np.abs(one - other) / np.maximum(1.0, np.abs(one))
        worst = max(worst, float(np.max(difference, initial=0)))
        worst = np.inf if (np.isnan(one) != np.isnan(other)).any() else worst
    return "exact" if worst < limit else f"differs {worst:.0e}", records


def _state(one: Any) -> list[Any]:
    variables = [
        *one.variables,
        *one.optimizer.variables,
        *(v for m in one.metrics for v in m.variables),
    ]
    return [np.asarray(v.value).astype("float64") for v in variables]


def entries(kind: str) -> Any:
    """(name, a function that makes a model, a function that makes a batch)."""
    if kind == "layers":
        for name, make, shape in cases.layers():
            yield (
                name,
                lambda make=make, shape=shape: model(make, shape),
                lambda n, shape=shape: rows(shape, n),
            )
    elif kind == "optimizers":
        for name, make in cases.optimizers():
            yield (
                name,
                lambda make=make: head("mse", None, make(), "bits"),
                lambda n: head_rows("bits", n),
            )
    else:
        for name, make, target in cases.losses() if kind == "losses" else cases.metrics():

            def made(make: Any = make, target: str = target) -> Any:
                loss = (
                    make()
                    if kind == "losses"
                    else "sparse_categorical_crossentropy"
                    if target == "class"
                    else "mse"
                )
                return head(loss, make() if kind == "metrics" else None, "sgd", target)

            yield name, made, lambda n, target=target: head_rows(target, n)


def planned(name: str) -> tuple[str, Any]:
    """The size of an application's images, and the records of its planned training step."""
    made = getattr(keras.applications, name)(weights=None, classes=10)
    size = made.input_shape[1] or 224  # MobileNetV3 takes any
    made.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    made.optimizer.build(made.trainable_variables)
    made._symbolic_build(data_batch=(np.zeros((2, size, size, 3), "float32"), np.zeros(2, "int32")))
    records: list[Any] = []
    specs = (tf.TensorSpec([None, size, size, 3]), tf.TensorSpec([None], tf.int32))

    def step(*data: Any) -> Any:
        return spread(made.train_step, (data,), DEVICES, records=records)

    tf.function(step, autograph=False).get_concrete_function(*specs)
    # Another process can't receive stacks.
    return f"planned {size}", [dataclasses.replace(one, stack=None) for one in records]


def apart(function: Any, *arguments: Any) -> Any:
    """A function's result, from a process that ends then: TensorFlow keeps graphs with weights."""
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), use_virtual_devices, (len(DEVICES),)
    ) as pool:
        return pool.submit(function, *arguments).result()


def measured(make: Any, batch_of: Any) -> tuple[str, Any]:
    """The comparison in double precision, or in single precision where there is no other."""
    result, records = "", []
    for floatx, limit in (("float64", 1e-8), ("float32", 1e-4)):
        keras.backend.set_floatx(floatx)
        try:
            result, records = compare(make, batch_of, limit)
        except Exception as error:
            result = f"FAILED {type(error).__name__} {str(error)[-300:]!r}"
        if result.startswith(("exact", "differs")):
            break
    return result, records


def main(kinds: list[str], only: list[str]) -> str | None:
    """Prints the census. Returns a message if applications leave too much to one device."""
    use_virtual_devices(len(DEVICES))
    totals = Totals()
    above = []
    for kind in kinds:
        for name, measure in measurements(kind):
            if only and name not in only:
                continue
            begin = time.perf_counter()
            result, records = measure()
            share = totals.add(name, records, result, time.perf_counter() - begin)
            if kind == "applications" and share > LIMIT:
                above.append(name)
    totals.show()
    return f"One device computes more than {LIMIT}% of {', '.join(above)}." if above else None


def measurements(kind: str) -> Any:
    """(name, a function that gives the result and the records)."""
    if kind == "applications":
        for name, _ in inspect.getmembers(keras.applications, inspect.isfunction):
            yield name, functools.partial(apart, planned, name)
    else:
        for name, make, batch_of in entries(kind):
            yield name, functools.partial(measured, make, batch_of)


if __name__ == "__main__":
    known = ("layers", "losses", "metrics", "optimizers", "applications")
    sys.exit(
        main(
            [one for one in sys.argv[1:] if one in known] or list(known),
            [one for one in sys.argv[1:] if one not in known],
        )
    )
