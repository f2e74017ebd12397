"""A process that runs cases one after the other and writes a line for each."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import keras

import keras_multigpu

from ..precision import keras_in_double_precision  # noqa: TID252 - the root is tests, or above
from . import draw, run, scripts, settings, shrink
from .case import Case

_WHOLE_PROCESS = contextlib.ExitStack()


def prepare(optimizes_graphs: bool = True) -> None:
    """Virtual devices, float64, and a process in which tracing is quick."""
    if keras.backend.backend() == "jax":
        import jax

        from keras_multigpu.engines.jax.state import state_shards

        jax.config.update("jax_enable_x64", True)
        _WHOLE_PROCESS.enter_context(keras_in_double_precision())
        state_shards._LEAST = 3  # `shard` spreads small weights too, but no seeds
    else:
        import tensorflow as tf

        from keras_multigpu.engines.tensorflow.weights import homes

        homes.LEAST = 16  # `shard` divides small weights too
        tf.config.threading.set_intra_op_parallelism_threads(1)
        if not optimizes_graphs:
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    keras_multigpu.use_virtual_devices(4)
    keras.config.set_floatx("float64")
    gc.collect()
    gc.freeze()  # keeps the collector from scanning all imported modules again and again
    gc.disable()


def work(
    seed: int, indices: range, modes: tuple[str, ...], out: Path, shrinking: float, end: float
) -> None:
    """Runs the cases of a seed until `end`, on the monotonic clock.

    Lines with a stage show where a process crashed.
    """
    with open(out / f"{keras.backend.backend()}-{seed}.jsonl", "a", encoding="utf-8") as lines:
        for index in indices:
            if time.monotonic() > end:
                return
            name = {"seed": seed, "index": index}

            def note(stage: str, name: dict = name) -> None:
                _write(lines, {**name, "stage": stage})

            note("plain")
            for record in records(seed, index, modes, out, shrinking, note):
                _write(lines, {**name, **record})
            if index % 5 == 4:
                forget_graphs()
                gc.collect()


def forget_graphs() -> None:
    """TensorFlow never forgets a graph that has custom gradients; drawn models make many."""
    if keras.backend.backend() == "tensorflow":
        from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251

        known = gradient_registry._registry
        for name in [name for name in known if name.startswith("CustomGradient")]:
            del known[name]


def records(
    seed: int,
    index: int,
    modes: tuple[str, ...],
    out: Path,
    shrinking: float,
    note: Callable[[str], None] = lambda stage: None,
) -> Iterator[dict]:
    """The outcomes of one drawn model, in each mode that it is compared in."""
    start, cpu = time.monotonic(), time.process_time()
    try:
        cases = settings.sides(draw.draw_case(seed, index, modes), modes)
    except draw.UndrawableError as error:
        yield {"outcome": "undrawable", "detail": str(error)}
        return
    for case, outcome in zip(cases, run.run_all(cases, note)):
        now, cpu_now = time.monotonic(), time.process_time()
        took = {"seconds": round(now - start, 2), "cpu": round(cpu_now - cpu, 2)}
        yield _record(case, run.classify(outcome), out, shrinking) | took
        start, cpu = time.monotonic(), time.process_time()


def _record(case: Case, outcome: run.Outcome, out: Path, shrinking: float) -> dict:
    if outcome.kind in run.BAD:
        shown = dataclasses.replace(outcome.shown or case, floatx=outcome.floatx)
        shown = shown.having(name=f"{case.name}-{case.mode}")
        write_script(shown, outcome, out, ".py")
        if shrinking:
            write_script(*smallest(shown, outcome, shrinking), out, ".small.py")
    return {
        "outcome": outcome.kind,
        "trials": outcome.trials,
        "mode": case.mode,
        "n": case.n,
        "options": dict(case.options),
        "layers": [make.name.removeprefix("layers.") for make in case.makes],
        "optimizer": case.optimizer.name.removeprefix("keras.optimizers."),
        "wiring": case.wiring,
        "finite": outcome.finite,
        **({"detail": outcome.detail} if outcome.detail else {}),
        **({"warned": outcome.warned} if outcome.warned else {}),
    }


def smallest(case: Case, outcome: run.Outcome, seconds: float) -> tuple[Case, run.Outcome]:
    """The simplest case with the same outcome, and that outcome."""
    found = {case: outcome}

    def is_same(candidate: Case) -> bool:
        try:
            result = run.classify(run.run(candidate))
        except Exception:  # a candidate that makes no sense
            return False
        found[candidate] = result
        same_error = result.detail.split(":")[0] == outcome.detail.split(":")[0]
        return result.kind == outcome.kind and (outcome.kind != run.CRASHED or same_error)

    result = shrink.shrink(case, is_same, seconds)
    return result, found[result]


def write_script(case: Case, outcome: run.Outcome, out: Path, end: str) -> Path:
    """Writes a case as a script that shows it."""
    path = out / f"{case.name}{end}"
    remark = f"{case.name}: {outcome.kind}. {outcome.detail}"
    path.write_text(scripts.script(case, remark), encoding="utf-8")
    return path


def _write(lines: TextIO, record: dict) -> None:
    lines.write(json.dumps(record) + "\n")
    lines.flush()
