"""A process that reads chunks for another one: `python -m`, a loader, then numbers of chunks."""

from __future__ import annotations

import os
import pickle
import sys


def main() -> None:
    """Answers numbers of chunks on standard input by chunks, or errors, on standard output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    loader = pickle.load(sys.stdin.buffer)
    while True:
        try:
            number = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = True, loader.load(number)
        except Exception as error:  # the one that asked raises it
            answer = False, error
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
