"""DeepCoNN on one device, on two, and with alternating devices: predictions and measurements.

    python -m benchmarks.deepconn --rounds 5

A published experiment took 20.5 s for an epoch on one GPU, 22.5 s with one branch on each of two,
and 23.0 s with layers that alternate between two. This repeats it on logical CPU devices of one
thread each. It prints the bytes that `reports.transfers` counts, the step that `reports.advise`
predicts from the measured step on one device and the measured link, and the measured steps. The
sides take turns, each in a separate process.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks import processes
from benchmarks.models import DEEPCONN

SIDES = ("plain", "branches", "alternating")


def measure(rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """The figures of every side; the sides take turns, round by round."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            request = {"side": side, "model": "deepconn", "devices": 2, "steps": steps}
            result = processes.run_module("benchmarks.step_worker", request)
            if "error" in result:
                sys.exit(f"{side}: {result['error']}")
            found[side].append(result)
            processes.progress(
                f"round {number}: {side}: {statistics.median(result['all_steps_ms']):.1f} ms"
            )
    return found


def predict(step_ms: float) -> dict[str, Any]:
    """Counts the bytes and predicts the steps of both placements, in this process.

    `step_ms` is the measured step on one device.
    """
    import keras_multigpu
    from benchmarks.step_worker import PLACEMENTS
    from keras_multigpu import reports

    keras_multigpu.use_virtual_devices(2)
    link = reports.measure_link()
    found: dict[str, Any] = {"link": str(link)}
    for side, placement in PLACEMENTS.items():
        template = DEEPCONN.build()
        advice = reports.advise(
            template,
            DEEPCONN.batch_size,
            (2,),
            modes=("model",),
            placement=placement,
            link=link,
            step_seconds=step_ms / 1000,
            processors=1,  # one device alone keeps the cores busy
        )
        parallel = keras_multigpu.make_parallel(template, 2, "model", placement=placement)
        DEEPCONN.compile(parallel, jit_compile=False)
        report = reports.transfers(parallel, DEEPCONN.make_batch())
        sent = report.bytes("training")
        found[side] = {
            "step_ms": 1000 * advice.predictions[0].step_s,
            "activations": sent.get("activations", 0),
            "gradients": sent.get("gradients", 0),
            "weights": sent.get("weights", 0),
            "notes": report.notes,
        }
    return found


def main() -> None:
    parser = processes.make_parser("deepconn", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a process")
    options = parser.parse_args()
    measured = measure(options.rounds, options.steps)
    medians = {
        side: [statistics.median(one["all_steps_ms"]) for one in results]
        for side, results in measured.items()
    }
    plain = statistics.median(medians["plain"])
    predicted = predict(plain)
    processes.report_setting(measured["plain"], predicted["link"])
    rows = []
    for side in SIDES:
        ratios = [ours / one for ours, one in zip(medians[side], medians["plain"])]
        guess = predicted.get(side, {"step_ms": plain})
        crossing = [f"{guess.get(kind, 0) / 1e6:.3f}" for kind in ("activations", "gradients")]
        rows.append(
            [
                "one device" if side == "plain" else side,
                *crossing,
                f"{guess['step_ms']:.1f}",
                f"{statistics.median(medians[side]):.1f}",
                processes.show_rounds(ratios, 2),
            ]
        )
    header = ["placement", "activations, MB", "gradients, MB", "predicted, ms", "measured, ms"]
    print(processes.markdown_table([*header, "measured, of one device"], rows))
    print("\n" + "\n".join(predicted["alternating"]["notes"]))


if __name__ == "__main__":
    main()
