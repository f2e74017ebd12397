"""Times the training steps of one model on one side, in this process: see `step_time`.

    python -m benchmarks.step_worker '{"side": "ours", "model": "mlp", "devices": 2, "steps": 10}'

The last line on stdout is a JSON object: the milliseconds of every step (`all_steps_ms`),
the processor time of every step in milliseconds (`all_cpu_ms`, all threads together), the seconds
until the end of the first step (`first_s`), the peak memory of the process (`peak_mb`), and the
versions.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from typing import Any

import keras
import numpy as np

import keras_multigpu
from benchmarks.models import DEEPCONN, TIMED, Benchmark
from benchmarks.processes import answer

_BACKEND = keras.backend.backend()
_WARM_UP = 3
_PART_MB = 12_000  # of a GPU's memory


class Clock(keras.callbacks.Callback):
    """Notes when each batch ends, and waits for its loss or its outputs."""

    def __init__(self):
        super().__init__()
        self.wall = [time.perf_counter()]
        self.cpu = [time.process_time()]

    def on_train_batch_end(self, batch, logs=None):
        for value in keras.tree.flatten(logs):
            np.asarray(value)
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def split_processor(devices: int) -> None:
    """Makes logical CPU devices with one thread per operation, as if each were one core.

    With JAX the flags in `step_time` set the thread. TensorFlow cuts the first GPU of a machine
    that has one, but fewer than devices.
    """
    if _BACKEND == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            if len(gpus) < devices:
                part = tf.config.LogicalDeviceConfiguration(memory_limit=_PART_MB)
                tf.config.set_logical_device_configuration(gpus[0], [part] * devices)
            return
        tf.config.threading.set_intra_op_parallelism_threads(1)
    keras_multigpu.use_virtual_devices(devices)


def _data(batch: tuple[Any, Any], steps: int, call: str) -> dict[str, Any]:
    """The arguments of a loop (`fit`, ...) for steps on one batch, which stays in memory."""
    if _BACKEND == "jax":
        length = "steps_per_epoch" if call == "fit" else "steps"
        return {"x": (batch for _ in range(steps)), length: steps}
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensors(batch).repeat(steps)}


# The options of data mode.
OPTIONS: dict[str, dict[str, Any]] = {
    "ours": {},
    "sharded": {"shard": "weights"},
    "slots": {"shard": "optimizer"},
}
# The layers on the second device: one review's, or every other layer.
PLACEMENTS = {
    "branches": None,
    "alternating": {".*_embedding": 1, ".*_conv": 0, ".*_max": 1, ".*_dense": 0, "match": 1},
}


# The first axis of each kernel goes over the devices, as the rows do: `shard="weights"` by hand.
LAYOUT = {
    ".*(query|key|value|attention_output)/kernel": ("batch", None, None),
    ".*dense.*/kernel": ("batch", None),
    ".*embeddings": ("batch", None),
}


def _distribute(side: str, devices: int) -> None:
    """Sets Keras's own distribution, on JAX."""
    names = [f"cpu:{index}" for index in range(devices)]
    if side == "distributed":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names))
    if side == "laid_out":
        mesh = keras.distribution.DeviceMesh((devices,), ["batch"], names)
        layout = keras.distribution.LayoutMap(mesh)
        for path, axes in LAYOUT.items():
            layout[path] = axes
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        )


def _compiled(benchmark: Benchmark, side: str, devices: int, jit: bool) -> list[keras.Model]:
    """The models of one side, compiled, to be trained one after the other."""
    if side == "separate":
        return [_compiled(benchmark, "plain", 1, jit)[0] for _ in range(devices)]
    _distribute(side, devices)
    if side in ("mirrored", "mirrored_sync"):
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy(list(keras_multigpu.list_devices()[:devices]))
        with strategy.scope():
            model = benchmark.build()
            for layer in model.layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = side == "mirrored_sync"
            benchmark.compile(model, jit_compile=jit)
        return [model]
    model = benchmark.build()
    if side in OPTIONS:
        model = keras_multigpu.make_parallel(model, n_gpus=devices, mode="data", **OPTIONS[side])
    if side == "towers":
        model = keras_multigpu.make_parallel(
            model, n_gpus=devices, mode="tower", replicas="independent", loss_of="replicas"
        )
    if side in PLACEMENTS:
        model = keras_multigpu.make_parallel(model, 2, "model", placement=PLACEMENTS[side])
    benchmark.compile(model, jit_compile=jit)
    return [model]


def measure(
    side: str, model: str, devices: int, steps: int, jit: bool = False, call: str = "fit"
) -> dict[str, Any]:
    """Times `fit`, `evaluate` or `predict`.

    Args:
        side: `"ours"`, `"plain"`, and `"mirrored"` (TensorFlow) or `"distributed"` (JAX);
            `"sharded"` or `"slots"`, ours with `shard="weights"` or `"optimizer"`; `"laid_out"`,
            `keras.distribution.ModelParallel` with `LAYOUT` (JAX); `"mirrored_sync"`, with
            `BatchNormalization(synchronized=True)` (TensorFlow);
            `"towers"`, an independent replica on every device, or `"separate"`, as many plain
            models, trained one after the other: a step is then one of each, added up;
            `"branches"` or `"alternating"`, a placement of the layers of `"deepconn"`.
        model: a name in `TIMED`, or `"deepconn"`.
        devices: the number of logical devices; plain models use the first.
        steps: the number of steps to time, after the first one and the warm-up.
        jit: compile with XLA, as JAX always does.
        call: which of the three.
    """
    split_processor(devices)
    keras.utils.set_random_seed(0)
    benchmark = DEEPCONN if model == "deepconn" else TIMED[model]
    models = _compiled(benchmark, side, devices, jit or _BACKEND == "jax")
    clocks = []
    for one in models:
        clocks.append(Clock())
        data = _data(benchmark.make_batch(), 1 + _WARM_UP + steps, call)
        getattr(one, call)(**data, verbose=0, callbacks=[clocks[-1]])
    return {
        "first_s": sum(clock.wall[1] - clock.wall[0] for clock in clocks),
        "all_steps_ms": _added([_intervals_ms(clock.wall[1 + _WARM_UP :]) for clock in clocks]),
        "all_cpu_ms": _added([_intervals_ms(clock.cpu[1 + _WARM_UP :]) for clock in clocks]),
        "peak_mb": _peak_mb(),
        "device": keras_multigpu.list_devices()[0].partition(":")[0],
    }


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1024)


def _added(parts: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*parts)]


def _intervals_ms(times: list[float]) -> list[float]:
    return [1000 * (end - start) for start, end in itertools.pairwise(times)]


def main() -> None:
    answer(measure, ("keras", _BACKEND, "keras_multigpu"))


if __name__ == "__main__":
    main()
