"""The command line. The exit status is 1 if a way hung, or no error named the odd process."""

import argparse
import atexit
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback

import keras
from support.out_of_step.process import run
from support.out_of_step.verdicts import brief, judge
from support.out_of_step.ways import WAYS
from support.worker_processes import free_port

LIMIT = 240.0  # seconds in which all must have ended, on a busy machine too


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", nargs="+", type=int, default=[2], help="of processes")
    parser.add_argument("--odd", nargs="*", type=int, help="their numbers; all by default")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--show", action="store_true", help="what they print")
    chosen = parser.parse_args()
    print(f"{keras.backend.backend()}\n\n| way | processes | odd | outcome | seconds | says |")
    print("|---|---:|---:|---|---:|---|", flush=True)
    outcomes = []
    for count in chosen.counts:
        for odd in range(count) if chosen.odd is None else chosen.odd:
            for way in chosen.ways:
                outcome, seconds, texts = attempt(way, odd, count)
                told = " / ".join(dict.fromkeys(map(brief, texts)))
                print(f"| {way} | {count} | {odd} | {outcome} | {seconds:.0f} | {told} |")
                if chosen.show or outcome in ("hang", "bad", "split"):
                    print("\n".join(f"--- {k}\n{text}" for k, text in enumerate(texts)))
                sys.stdout.flush()
                outcomes.append(outcome)
    print({one: outcomes.count(one) for one in sorted(set(outcomes))})
    return int(not set(outcomes) <= {"right", "other"})


def attempt(way, odd, count):
    """Runs a way; the outcome, the seconds it took, and what each process has printed."""
    folder = pathlib.Path(tempfile.mkdtemp())  # a process would delete a `TemporaryDirectory`
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    files = [folder / str(number) for number in range(count)]
    children = [_start(files[k], way, odd, count, k, address) for k in range(count)]
    left = dict(enumerate(children))
    while left and time.monotonic() < begun + LIMIT:
        for number, child in list(left.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del left[number]
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    for child in left.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    texts = [file.read_text() for file in files]
    shutil.rmtree(folder)
    return ("hang" if left else judge(way, odd, texts)), seconds, texts


def _start(file, *arguments):
    child = os.fork()
    if child:
        return child
    try:
        output = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run(*arguments, timeout=20.0)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
