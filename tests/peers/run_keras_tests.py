"""Keras's own tests, from the installed wheel, with the models they train made parallel.

Usage: `python tests/peers/run_keras_tests.py [-k EXPRESSION] [--devices N] [FILE ...]`, where
Keras, TensorFlow, pytest, absl-py, scipy, jax and grain are installed; `--help` tells the rest.

Every file is run three times, each time in a new process: plain; with Keras's test classes that
mix a trainer and a layer turned into models; and with these and all other models trained by a
parallel model on virtual devices. Prints a Markdown table and what passes plain but fails wrapped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
_FILES = ("trainers/trainer_test.py", "saving/saving_lib_test.py", "models/*_test.py")
_MODES = ("plain", "models", "wrapped")
_OPTIONS = {
    "--no-calls": "leave `model(x)` plain",
    "--with-save": "let parallel models write whole-model files too",
    "--any-batch": "leave out the batch sizes that tests build into inputs (not in the plain run)",
}

Outcomes = dict[str, dict[str, Any]]


def main() -> None:
    """Runs the files and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=_FILES, help="patterns within keras/src")
    parser.add_argument("-k", default="", help="only the tests that pytest's -k chooses")
    parser.add_argument("--devices", type=int, default=2)
    for option, text in _OPTIONS.items():
        parser.add_argument(
            option, dest="options", action="append_const", const=option, default=[], help=text
        )
    parser.add_argument("--json", type=pathlib.Path, help="where to write all outcomes")
    arguments = parser.parse_args()
    spec = importlib.util.find_spec("keras")  # found, not imported: the tests' processes do that
    root = pathlib.Path(spec.origin).parent / "src"
    files = sorted(path for pattern in arguments.files for path in root.glob(pattern))
    results = {}
    for path in files:
        name = path.relative_to(root).as_posix()
        results[name] = {mode: _run(name, mode, arguments) for mode in _MODES}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    _print_table(results)
    _print_failures(results)


def _run(name: str, mode: str, arguments: argparse.Namespace) -> Outcomes:
    """Runs one file in a process of its own."""
    module = "keras.src." + name.removesuffix(".py").replace("/", ".")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    paths = [str(_HERE), str(_HERE.parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        outcomes = pathlib.Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "wrap_plugin", "--pyargs", module]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "-W", "ignore"]
        command += [f"--mode={mode}", f"--devices={arguments.devices}", f"--outcomes={outcomes}"]
        command += arguments.options + (["-k", arguments.k] if arguments.k else [])
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        _say(f"{name} {mode}: {(done.stdout.strip().splitlines() or [done.stderr])[-1]}")
        if not outcomes.exists():
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        return json.loads(outcomes.read_text())


def _passed(outcomes: Outcomes) -> set[str]:
    return {test for test, entry in outcomes.items() if entry["outcome"] == "passed"}


def _print_table(results: dict[str, dict[str, Outcomes]]) -> None:
    print("| file | tests | pass plain | as models | wrapped | sliced | pass sliced | calls |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    totals = [0] * 7
    for name, runs in results.items():
        passed = {mode: _passed(outcomes) for mode, outcomes in runs.items()}
        plain, wrapped = passed["plain"], runs["wrapped"]
        sliced = {test for test in plain if wrapped.get(test, {}).get("slicings")}
        calls = sum(sum(entry.get("calls", {}).values()) for entry in wrapped.values())
        row = [len(runs["plain"]), len(plain), len(plain & passed["models"])]
        row += [len(plain & passed["wrapped"]), len(sliced), len(sliced & passed["wrapped"]), calls]
        totals = [total + number for total, number in zip(totals, row)]
        print(f"| {name} | {' | '.join(map(str, row))} |")
    print(f"| all | {' | '.join(map(str, totals))} |")
    print(
        "\nSliced: of the tests that pass plain, those in which a parallel model called its "
        "replicas. Calls: methods of plain models that parallel models ran."
    )
    if not totals[-1]:
        sys.exit("Nothing was wrapped: the numbers say nothing.")


def _print_failures(results: dict[str, dict[str, Outcomes]]) -> None:
    print("\nPass plain, fail wrapped:\n")
    for name, runs in results.items():
        for test in sorted(_passed(runs["plain"]) - _passed(runs["wrapped"])):
            entry = runs["wrapped"].get(test, {"error": "was not run"})
            alone = "" if test in _passed(runs["models"]) else " (also as a model, not wrapped)"
            print(f"- {name} `{test}`{alone}: {entry['error'][:300]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
