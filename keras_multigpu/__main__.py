"""The command line: `python -m keras_multigpu check`, `demo`, `bench`, `devices`, `serve`.

Whatever needs Keras is imported by the command that needs it, after the arguments are read.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from keras_multigpu.launched import split_address
from keras_multigpu.version import __version__

_MODELS = ("mlp", "resnet50")  # of `bench`


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; `arguments` default to this process's command line."""
    parser = make_parser()
    known, unknown = parser.parse_known_args(arguments)
    chosen = vars(known)
    command, run, own = chosen.pop("command"), chosen.pop("run"), chosen.pop("parser")
    if unknown:  # the usage of the command says what it takes
        own.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:  # a missing backend, or one that is not supported, is met here
        from keras_multigpu import cluster, engines

        engines.current()
        if command == "serve":
            cluster.serve(**chosen)
            return
    except (ImportError, RuntimeError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    module, _, name = run.partition(".")
    result = getattr(importlib.import_module(f"keras_multigpu.{module}"), name)(**chosen)
    if command == "devices":
        print(*result, sep="\n")
    if result is False:  # the check has failed
        parser.exit(1)


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_multigpu", description="Multi-GPU training of any Keras model."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="say what is here, and compare one device with all")
    check.set_defaults(run="check.run_check")
    demo = commands.add_parser("demo", help="train on one device and on several, and compare")
    demo.add_argument(
        "--devices",
        "--n-gpus",
        dest="n_gpus",
        type=_positive,
        help="how many devices (default: all GPUs, or 4)",
    )
    demo.add_argument("--epochs", type=_positive, default=5, help="how many epochs (default: 5)")
    demo.set_defaults(run="demo.run_demo")
    devices = commands.add_parser("devices", help="list the devices that can be used")
    devices.set_defaults(run="devices.list_devices")
    _add_bench(commands)
    _add_serve(commands)
    for one in commands.choices.values():
        one.set_defaults(parser=one)
    return parser


def _positive(text: str) -> int:
    """A positive integer, of an option."""
    if not text.isdigit() or not int(text):
        cure = f". Put spaces between several: {text.replace(',', ' ')}" if "," in text else ""
        raise argparse.ArgumentTypeError(f"must be a positive integer. Received: {text}{cure}")
    return int(text)


def _address(text: str) -> str:
    """An address, of the option `--bind`."""
    try:
        return split_address("bind", text)[0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("`bind` ", "")) from error


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="time a model on 1, 2, 4 devices")
    said, counts = "default: resnet50 on GPUs, and else mlp", "default: 1, 2, 4, ..."
    bench.add_argument("--model", choices=_MODELS, help=said)
    bench.add_argument("--batch-size", type=_positive, help="rows on all devices together")
    bench.add_argument("--devices", "--n-gpus", type=_positive, nargs="+", metavar="N", help=counts)
    bench.add_argument("--steps", type=_positive, default=20, help="batches of a run (default: 20)")
    bench.add_argument("--repeats", type=_positive, default=3, help="timed runs (default: 3)")
    bench.set_defaults(run="bench.run_bench")


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve this machine's devices to a process on another one (TensorFlow)",
        description="Serves this machine's devices to a process that calls "
        "keras_multigpu.cluster.connect(['HOST:PORT']). TensorFlow's server has no password and no "
        "encryption: anyone who reaches it can run computations with the rights of this process, "
        "and read and write its files. By default only processes of this machine can reach it.",
    )
    serve.add_argument(
        "--bind",
        type=_address,
        default="127.0.0.1:2222",
        metavar="HOST:PORT",
        help="the only address at which this machine can be reached; 0.0.0.0 for all its "
        "addresses (default: 127.0.0.1:2222, this machine only)",
    )
    serve.add_argument(
        "--virtual-devices",
        type=_positive,
        default=1,
        metavar="N",
        help="how many CPU devices to divide the processor into (default: 1)",
    )
    serve.set_defaults(run="")


if __name__ == "__main__":
    main()
