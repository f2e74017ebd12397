"""A process that trains one model after the other: `child DEVICES SEED FIRST LAST SECONDS`.

It writes a line for each model that begins or ends, and for each step.
"""

# ruff: noqa: T201
from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sys
import time
import warnings
from typing import Any

import keras

import keras_multigpu
from tests.support.fuzz import draw as fuzz_draw
from tests.support.fuzz import program, run
from tests.support.fuzz.case import Case

from . import draw

_FIT_SECONDS = 6.0  # then `fit` ends


def tell(kind: str, **facts: Any) -> None:
    """Writes a line."""
    print(json.dumps({"kind": kind, **facts}), flush=True)


class Pulse(keras.callbacks.Callback):
    """Tells of each step, and ends `fit` in time."""

    def _begin(self, logs: Any = None) -> None:
        self._latest, self._is_first = time.monotonic(), True

    def _step(self, batch: int, logs: Any = None) -> None:
        now = time.monotonic()
        tell("first step" if self._is_first else "step", seconds=now - self._latest)
        self._latest, self._is_first = now, False

    def on_train_begin(self, logs=None):
        self._begin()
        self._end = self._latest + _FIT_SECONDS

    def on_train_batch_end(self, batch, logs=None):
        self._step(batch)
        self.model.stop_training |= time.monotonic() > self._end

    on_test_begin = on_predict_begin = _begin
    on_test_batch_end = on_predict_batch_end = _step


def train(case: Case, sizes: dict[str, int]) -> run.Outcome:
    """Trains, evaluates and predicts; gives what came of it."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras.config.set_floatx(case.floatx)
    keras.config.set_dtype_policy(case.floatx)
    names = fuzz_draw.namespace()
    exec(compile(program.definitions(case.having(actions=())), case.name, "exec"), names)
    options = {name: eval(value) for name, value in case.options}
    try:
        model = keras_multigpu.make_parallel(names["build"](), case.n, mode=case.mode, **options)
        names["use"](model)  # compiles it
        _loops(case, names, model, sizes)
    except Exception as error:  # sorted by whose error it is
        whole = case.having(actions=tuple(sizes), options=())
        exec(compile(program.definitions(whole), case.name, "exec"), names)
        return run.failure(names, error)
    return run.Outcome("trained")


def _loops(case: Case, names: dict[str, Any], model: keras.Model, sizes: dict[str, int]) -> None:
    x, y = names["X"], names["Y"]
    if case.feeding == "csr":
        x = names["scipy_csr"](x)
    if "Ragged" in case.sources[0].data:
        data = names["tf"].data.Dataset.from_tensor_slices((x, y)).batch(case.batch)
        model.fit(data, epochs=100, verbose=0, callbacks=[Pulse()])
        return
    more = {name: eval(value, names) for name, value in case.fit}
    given = {name: {"batch_size": size, "verbose": 0} for name, size in sizes.items()}
    model.fit(x, y, epochs=1000, callbacks=[Pulse()], **given["fit"], **more)
    for _ in range(2):
        model.evaluate(x, y, callbacks=[Pulse()], **given["evaluate"])
        model.predict(x, callbacks=[Pulse()], **given["predict"])
    model.fit(x, y, callbacks=[Pulse()], **given["fit"], **more)


def main(devices: int, seed: int, first: int, last: int, seconds: float) -> None:
    """Trains the models from `first` to `last`, until the time is over."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras_multigpu.use_virtual_devices(devices)
    end = time.monotonic() + seconds
    for index in range(first, last):
        if time.monotonic() > end:
            return
        try:
            case, sizes = draw.draw_training(seed, index, devices)
        except fuzz_draw.UndrawableError:
            continue
        tell("begin", index=index, name=case.name, mode=case.mode)
        outcome = train(case, sizes)
        tell("end", outcome=outcome.kind, detail=outcome.detail)
        gc.collect()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), float(sys.argv[5]))
