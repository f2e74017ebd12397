"""Where the processor time of a training step goes, by TensorFlow's profiler.

    python -m benchmarks.profile_step --models mlp convnet --devices 2 8

Times are sums over all threads, on logical CPU devices with one intra-op thread each, without
waiting. Every measurement runs in a separate process.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import keras

from benchmarks import processes
from benchmarks.models import MODELS

# What an operation does, by its name in the graph: the first match. Replicas with loops are
# separate functions, whose names begin with the model's, or with `gradients`.
KINDS = {
    "sends between devices": r":_(Send|Recv|HostSend|HostRecv)$",
    "backwards": r"gradients(_\d+)?/.*PartitionedCall|^gradients/",
    "forwards": r"/PartitionedCall|^(?!StatefulPartitionedCall)\w+/.*:[A-Z_]",
    "slices and merges": r"/(slice|merge)(_\d+)?/",
    "sums of gradients": r"gradients(_\d+)?/",
    "update": r"/adam/",
    "loss and metrics": r"compile_loss|gradient_tape",
    "weights on their way": r":(Identity|SplitV|ConcatV2|Reshape|ReadVariableOp)$",
    "other operations": r"[^:]:[A-Z_]",
    "TensorFlow's executor": r"^ExecutorState::",
}
_WARM_UP = 3


class Profiler(keras.callbacks.Callback):
    """Profiles the batches after the warm-up."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def on_train_batch_begin(self, batch, logs=None):
        import tensorflow as tf

        if batch == _WARM_UP:
            tf.profiler.experimental.start(self.folder)

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])

    def on_train_end(self, logs=None):
        import tensorflow as tf

        tf.profiler.experimental.stop()


def measure(model: str, devices: int, steps: int) -> dict[str, Any]:
    """The milliseconds of a step by kind, and each operation's under `"operations"`."""
    import tensorflow as tf

    import keras_multigpu
    from benchmarks.step_worker import split_processor

    split_processor(devices)
    keras.utils.set_random_seed(0)
    parallel = keras_multigpu.make_parallel(MODELS[model].build(), devices)
    MODELS[model].compile(parallel, jit_compile=False)
    data = tf.data.Dataset.from_tensors(MODELS[model].make_batch()).repeat(_WARM_UP + steps)
    with tempfile.TemporaryDirectory() as folder:
        parallel.fit(data, verbose=0, callbacks=[Profiler(folder)])
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        times = collections.Counter[str]()
        for name, own in _own_times(file.read_bytes()):
            times[name] += own / steps
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, own in times.items():
        kind = next((kind for kind, text in KINDS.items() if re.search(text, name)), None)
        if kind is not None:
            kinds[kind] += own
    return {**kinds, "operations": times.most_common(40)}


def _own_times(profile: bytes) -> Iterator[tuple[str, float]]:
    """Every event's name and milliseconds, without the events within it."""
    # TensorFlow has no other reader for its profiler's files.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(profile)
    for plane in space.planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            ends: list[tuple[float, str]] = []  # the enclosing events, the innermost last
            for event in sorted(line.events, key=lambda one: (one.offset_ps, -one.duration_ps)):
                name = plane.event_metadata[event.metadata_id].name.partition("#")[0]
                while ends and ends[-1][0] <= event.offset_ps:
                    ends.pop()
                if ends:
                    yield ends[-1][1], -event.duration_ps / 1e9
                yield name, event.duration_ps / 1e9
                ends.append((event.offset_ps + event.duration_ps, name))


def table(results: list[dict[str, Any]]) -> str:
    """A row for each kind, a column for each measurement."""
    header = ["ms a step", *("{model} on {devices}".format(**result) for result in results)]
    rows = []
    for kind in KINDS:
        cells = []
        for result in results:
            total = sum(result.get(one, 0.0) for one in KINDS)
            own = result.get(kind)
            cells.append("-" if own is None else f"{own:.1f} ({own / total:.0%})")
        rows.append([kind, *cells])
    return processes.markdown_table(header, rows)


def main() -> None:
    parser = processes.make_parser("profile_step", __doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "convnet"], choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 8], metavar="N")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--operations", type=int, default=0, help="print so many of each")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        processes.answer(measure, ("keras", "tensorflow", "keras_multigpu"), options.measure)
        return
    results = []
    for model in options.models:
        for devices in options.devices:
            request = {"model": model, "devices": devices, "steps": options.steps}
            arguments = ("--measure", json.dumps(request))
            found = processes.run_module("benchmarks.profile_step", *arguments)
            results.append({**request, **found})
            processes.progress(f"{model} on {devices}: {found.get('error', 'done')}")
    print(f"- {processes.host()}\n- {processes.merge_versions(results)}\n\n{table(results)}")
    for result in results:
        for name, own in result.get("operations", [])[: options.operations]:
            print("{model} on {devices}".format(**result), f"{own:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
