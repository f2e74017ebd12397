"""How long the first `fit`, `evaluate` and `predict` take: tracing, spreading, compiling, a step.

    python -m benchmarks.first_calls
    KERAS_BACKEND=jax python -m benchmarks.first_calls --models ResNet50 --devices 2

Plain Keras and a parallel model take turns, each in its own process. The figures are seconds of
processor time, all threads together, which other work on the machine disturbs less than the clock.
"""

from __future__ import annotations

import keras

from benchmarks.processes import (
    make_parser,
    markdown_table,
    progress,
    report_setting,
    run_module,
    show_rounds,
)

_CALLS = ("fit", "evaluate", "predict")


def main() -> None:
    parser = make_parser("first_calls", __doc__)
    parser.add_argument("--models", nargs="+", default=["EfficientNetV2B0"])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="rounds")
    parser.add_argument("--rows", type=int, default=32, help="of the batch")
    parser.add_argument("--size", type=int, default=64, help="height and width of a picture")
    options = parser.parse_args()
    rows, results = [], []
    for model in options.models:
        sides: dict[int, list[dict]] = {0: [], options.devices: []}
        for _ in range(options.repeats):
            for devices, found in sides.items():
                request = {"model": model, "devices": devices}
                request |= {"rows": options.rows, "size": options.size}
                found.append(run_module("benchmarks.first_calls_worker", request))
                progress(f"{model}, {devices or 'plain'}: {found[-1]}")
        for devices, found in sides.items():
            name = f"{model}, {options.devices} devices" if devices else f"{model}, plain Keras"
            errors = [one["error"] for one in found if "error" in one]
            cells = errors[:1] or [
                show_rounds([one[call]["cpu_s"] for one in found], 1) for call in _CALLS
            ]
            rows.append([name, *cells])
            results += found
    shape = f"batches of {options.rows} pictures of {options.size} x {options.size}"
    report_setting(results, f"{keras.backend.backend()}, {options.repeats} rounds, {shape}, Adam")
    print(markdown_table(["first call, seconds of processor time", *_CALLS], rows))


if __name__ == "__main__":
    main()
