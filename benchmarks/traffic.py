"""Counts what crosses between devices in a training step, in data mode beside the lower bound.

    python -m benchmarks.traffic --models mlp convnet text --devices 2 4 8
    python -m benchmarks.traffic --shard weights
    python -m benchmarks.traffic --models mlp transformer --spread
    python -m benchmarks.traffic --models mlp transformer --devices 4 8 --model-devices 2
    KERAS_BACKEND=jax python -m benchmarks.traffic

Nothing is timed: the counts hold for GPUs too. For trained weights of P bytes, at least
2 x P x (n - 1) bytes cross over all devices, and 2 x P x (n - 1) / n into and out of each. No bound
is known where the weights of large layers are spread (`--spread`: over all devices).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

import keras_multigpu
from benchmarks.models import MODELS
from benchmarks.processes import host, make_parser, markdown_table, progress
from keras_multigpu.engines import Transfer
from keras_multigpu.reports import TransfersReport, transfers

_BETWEEN = ("weights", "gradients", "activations", "other")


def count(model: str, devices: int, options: Mapping[str, Any]) -> TransfersReport:
    """The transfers of a training step on several devices, with options of `make_parallel`."""
    benchmark = MODELS[model]
    parallel = keras_multigpu.make_parallel(benchmark.build(), devices, **options)
    benchmark.compile(parallel, jit_compile=keras.backend.backend() == "jax")
    return transfers(parallel, benchmark.make_batch())


def row(model: str, devices: int, report: TransfersReport) -> list[str]:
    """A row of the table."""
    sent = report.bytes("training")
    between = [one for one in report.training if one.kind in _BETWEEN]
    busiest = max(
        max(_added(between, "source", name), _added(between, "target", name))
        for name in report.devices
    )
    total = sum(sent.get(kind, 0) for kind in _BETWEEN)
    parts = [sent.get(kind, 0) for kind in _BETWEEN]
    return [
        model,
        str(devices),
        *(f"{size / 1e6:.3f}" for size in parts),
        *_ratios(between, total, busiest, report.least, devices),
    ]


def _ratios(
    between: Sequence[Transfer], sent: float, busiest: float, least: int | None, devices: int
) -> list[str]:
    """The least, and both as ratios to it; where there is none, the bytes of the busiest device."""
    unknown = sum(one.bytes is None for one in between)
    if unknown:
        return ["-", f"not known: the size of {unknown} tensors is not", "-"]
    if not least:
        return ["-", f"{sent / 1e6:.3f} MB", f"{busiest / 1e6:.3f} MB"]
    return [f"{least / 1e6:.3f}", f"{sent / least:.3f}", f"{busiest / (least / devices):.2f}"]


def _added(ones: Iterable[Transfer], end: str, name: str) -> int:
    return sum(one.bytes or 0 for one in ones if getattr(one, end) == name)


def table(models: Sequence[str], devices: Sequence[int], options: Mapping[str, Any]) -> str:
    """The counts of all models as a Markdown table, in MB."""
    rows = []
    for model in models:
        for number in devices:
            rows.append(row(model, number, count(model, number, options)))
            progress(f"{model} on {number}: {rows[-1][-2]} of the least")
    header = ["model", "devices", *(f"{kind}, MB" for kind in _BETWEEN), "least, MB"]
    return markdown_table([*header, "sent/least", "busiest device/(least/n)"], rows)


def main() -> None:
    parser = make_parser("traffic", __doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "convnet", "text", "transformer"])
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--wire-dtype", choices=["bfloat16", "float16"], help="TensorFlow only")
    parser.add_argument("--shard", choices=["optimizer", "weights"])
    parser.add_argument("--spread", action="store_true", help="large layers, in mode model")
    parser.add_argument(
        "--model-devices", type=int, metavar="N", help="of a mesh of data and model"
    )
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("wire_dtype", "shard", "model_devices")}
    given = {name: value for name, value in chosen.items() if value}
    if options.spread:
        given |= {"mode": "model", "placement": "spread"}
    keras_multigpu.use_virtual_devices(max(options.devices))
    keras.utils.set_random_seed(0)
    print(f"- {host()}\n- keras {keras.__version__} on {keras.backend.backend()}\n")
    print(table(options.models, options.devices, given))


if __name__ == "__main__":
    main()
