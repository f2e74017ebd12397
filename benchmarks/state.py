"""Counts the bytes of weights and optimizer slots that each device keeps with `shard`.

    python -m benchmarks.state --models mlp resnet50 transformer wide --devices 2 4 8
    KERAS_BACKEND=jax python -m benchmarks.state

Nothing is timed: the counts hold for GPUs too. With Adam, weights and slots are three times the
weights, so that an even part is 3 P / n.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Sequence

import keras
import numpy as np

import keras_multigpu
from benchmarks.models import MODELS
from benchmarks.processes import host, make_parser, markdown_table, progress


def count(model: str, devices: int, shard: str) -> tuple[list[int], int]:
    """The bytes that each device keeps, and the bytes of one copy of everything."""
    benchmark = MODELS[model]
    keras.utils.set_random_seed(0)
    with warnings.catch_warnings():
        # Of weights that JAX can't cut evenly: the table shows it.
        warnings.simplefilter("ignore")
        parallel = keras_multigpu.make_parallel(benchmark.build(), devices, shard=shard)
    benchmark.compile(parallel, jit_compile=keras.backend.backend() == "jax")
    parallel.optimizer.build(parallel.trainable_variables)
    state = [*parallel.weights, *parallel.optimizer.variables]
    kept: collections.Counter[str] = collections.Counter()
    for variable in state:
        for device, size in _parts(variable):
            kept[device] += size
    return list(kept.values()), sum(np.asarray(variable).nbytes for variable in state)


def _parts(variable: keras.Variable) -> list[tuple[str, int]]:
    """The devices that keep a variable or parts of it, with the bytes on each."""
    if keras.backend.backend() == "jax":
        shards = variable.value.addressable_shards
        return [(str(shard.device), shard.data.nbytes) for shard in shards]
    from keras_multigpu.engines.tensorflow.weights.divided import parts_of

    return [(part.device, part.numpy().nbytes) for part in parts_of(variable)]


def table(models: Sequence[str], devices: Sequence[int], shard: str) -> str:
    """The counts of all models as a Markdown table, in MB."""
    rows = []
    for model in models:
        for number in devices:
            kept, total = count(model, number, shard)
            even = total / number
            figures = (total, even, max(kept))
            rows.append([model, str(number), *(f"{size / 1e6:.2f}" for size in figures)])
            rows[-1].append(f"{max(kept) / even:.3f}")
            progress(f"{model} on {number}: {rows[-1][-1]} of an even part")
    header = ["model", "devices", "one copy, MB", "even part, MB", "most on a device, MB"]
    return markdown_table([*header, "most/even"], rows)


def main() -> None:
    parser = make_parser("state", __doc__)
    models = ["mlp", "resnet50", "transformer", "wide"]
    parser.add_argument("--models", nargs="+", default=models, choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--shard", default="weights", choices=["optimizer", "weights"])
    options = parser.parse_args()
    keras_multigpu.use_virtual_devices(max(options.devices))
    print(f"- {host()}\n- keras {keras.__version__} on {keras.backend.backend()}\n")
    print(table(options.models, options.devices, options.shard))


if __name__ == "__main__":
    main()
