"""The command line: `python -m keras_multigpu demo`, `python -m keras_multigpu devices`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from keras_multigpu.demo import run_demo
from keras_multigpu.devices import list_devices


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
        arguments: the words of the command line after the program's name; `None` for those of
            this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_multigpu", description="Multi-GPU training of any Keras model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train on one device and on several, and compare")
    demo.add_argument("--devices", type=int, default=4, help="how many devices (default: 4)")
    demo.add_argument("--epochs", type=int, default=5, help="how many epochs (default: 5)")
    commands.add_parser("devices", help="list the devices that can be used")
    chosen = parser.parse_args(arguments)
    if chosen.command == "demo":
        run_demo(chosen.devices, chosen.epochs)
    else:
        print(*list_devices(), sep="\n")


if __name__ == "__main__":
    main()
