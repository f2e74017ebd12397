"""The check: what is here, whether several devices compute what one does, and what to do next."""

from __future__ import annotations

import importlib.util

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.devices import explain_no_gpus, find_only_gpu, list_devices, take_several
from keras_multigpu.extras import how_to_install
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports import measure_link, scaling
from keras_multigpu.reports.forms import describe_environment, show_bytes, show_seconds
from keras_multigpu.reports.timing import Stopwatch

_EXTRAS = {
    "reports": ("matplotlib", "pandas"),
    "sparse": ("pyarrow", "scipy", "xxhash"),
    "sparse-numba": ("numba",),
    "demo": ("sklearn",),
}
_ROWS, _BATCH_SIZE = 1000, 96  # the last batch is incomplete
# Differences of a weight that rounding explains; GPUs may multiply in TensorFloat-32.
_LARGEST = {"cpu": 1e-4, "gpu": 1e-2}


def run_check() -> bool:
    """Prints what is here, trains a small model on one and on all devices, and compares.

    If there are fewer than two GPUs, virtual devices stand in; a single GPU trains the model too.

    Returns:
        Whether the weights agree to float rounding.
    """
    devices, which = take_several(None)
    gpus = engines.current().list_devices("gpu")
    for name, text in describe_environment(list_devices()).items():
        print(f"{name}: {text}")
    print(f"extras: {_find_extras()}")
    print(which)
    if devices[0] in gpus:
        link = measure_link(*devices[:2])
        print(f"link from {link.name}: {show_bytes(link.bytes_per_s)}/s")
    count = len(devices)
    print(f"\nA small model, trained on 1 and on {count} devices:")
    agree = _tell_weights(devices[:1], devices)
    print(f"- times: {_time(count)}")
    only = find_only_gpu()
    if only:
        print(f"\nThe same model, trained on {only} and on {devices[0]}:")
        agree = _tell_weights((only,), devices[:1]) and agree
        print(f"- time: a step takes {show_seconds(_time_step(only))} on {only}")
    print("\nNext:")
    for line in _advise(agree, gpus, devices):
        print(f"- {line}")
    return agree


def _find_extras() -> str:
    missing = {
        extra: [name for name in names if importlib.util.find_spec(name) is None]
        for extra, names in _EXTRAS.items()
    }
    lacking = [f"{extra} ({', '.join(names)})" for extra, names in missing.items() if names]
    if not lacking:
        return "all are installed"
    return f"missing are {', '.join(lacking)}. To add one: {how_to_install('EXTRA')}"


def _build() -> keras.Model:
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((32,)), dense(256, "tanh"), dense(256, "tanh"), dense(4)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(_ROWS, 32)).astype("float32")
    return x, np.sin(x[:, :4])


def _tell_weights(some: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Prints how far trainings on two tuples of devices are apart; returns whether they agree."""
    kinds = {name.partition(":")[0] for name in some + others}
    difference = _compare(some, others)
    agree = difference < max(_LARGEST[kind] for kind in kinds)
    verdict = "they agree to float rounding" if agree else "THEY DISAGREE"
    print(f"- weights: the largest difference is {difference:.1e}; {verdict}")
    return agree


def _compare(some: tuple[str, ...], others: tuple[str, ...]) -> float:
    """The largest difference between weights that were trained on two tuples of devices."""
    first, second = _build(), _build()
    second.set_weights(first.get_weights())
    for model, used in ((first, some), (second, others)):
        parallel = make_parallel(model, devices=used)
        parallel.fit(*_data(), batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    pairs = zip(first.get_weights(), second.get_weights())
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def _time_step(device: str) -> float:
    """The seconds that a step takes on one device."""
    parallel, watch = make_parallel(_build(), devices=[device]), Stopwatch()
    parallel.fit(*_data(), batch_size=_BATCH_SIZE, verbose=0)
    parallel.fit(*_data(), batch_size=_BATCH_SIZE, epochs=3, verbose=0, callbacks=[watch])
    assert watch.step_seconds is not None, "an epoch has several steps"
    return watch.step_seconds


def _time(count: int) -> str:
    measured = scaling(_build(), _data(), (1, count), batch_size=_BATCH_SIZE, verbose=0)
    first, last = (run.step_seconds or run.median for run in measured.runs)
    return (
        f"a step takes {show_seconds(first)} on 1 device and {show_seconds(last)} on {count}, "
        f"{last / first:.2f} times as long. The model is tiny: yours may gain more, or less."
    )


def _advise(agree: bool, gpus: tuple[str, ...], devices: tuple[str, ...]) -> list[str]:
    lines = []
    if not agree:
        lines += ["Please report the difference, with all that is printed here."]
    if devices[0] in gpus:
        return [
            *lines,
            f"`make_parallel(model)` uses all {len(gpus)} GPUs.",
            "`python -m keras_multigpu bench` measures a larger model; `reports.scaling(model, "
            "data)` measures yours",
        ]
    lines += ["The virtual devices share one processor: their times say nothing about GPUs."]
    if gpus:
        lines += [
            f"`make_parallel(model)` trains on {', '.join(gpus)}, as Keras does.",
            "`python -m keras_multigpu bench` times a larger model on it.",
            "`reports.advise(model, batch_size)` predicts what more GPUs would gain.",
        ]
    else:
        lines += [f"No GPU was found. Possible reason: {reason}" for reason in explain_no_gpus()]
    return [*lines, "To try several devices: call `keras_multigpu.use_virtual_devices(4)` first."]
