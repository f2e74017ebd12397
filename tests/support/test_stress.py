"""The stress test trains in all modes, and notices a process that hangs or dies."""

import pathlib
import subprocess
import sys

import pytest
from support.stress.watch import HangError, Tally, watch

_BEGIN = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
def tell(kind, **facts):
    print(json.dumps({"kind": kind, **facts}), flush=True)
tell("begin", index=0, name="1-0", mode="data")
tell("first step", seconds=2.0)
tell("step", seconds=0.5)
"""


def _watch(end, limit=20.0):
    tally = Tally()
    try:
        watch([sys.executable, "-c", _BEGIN + end], tally, limit)
    finally:
        assert (tally.steps, tally.longest, tally.longest_first) == (2, 0.5, 2.0)
    return tally


@pytest.mark.backend_free
def test_what_a_process_does_is_counted():
    ends = (
        "tell('end', outcome='refused', detail='')\ntell('begin', index=1, name='1-1', mode='a')\n"
    )
    tally = _watch(ends + "tell('end', outcome='CRASHED', detail='a fault')")
    assert str(tally) == (
        "2 trainings (1 a, 1 data; 1 CRASHED, 1 refused), 2 steps, at most 0.5 s between two steps "
        "and 2.0 s to the first of a loop"
    )
    assert tally.errors == ["CRASHED, 1-1, a: a fault"]


@pytest.mark.backend_free
def test_a_process_that_hangs_shows_where(capfd):
    with pytest.raises(HangError, match="Nothing came for 2 s"):
        _watch("def stuck():\n    time.sleep(60)\nstuck()", limit=2.0)
    assert "in stuck" in capfd.readouterr().err


@pytest.mark.backend_free
def test_a_process_that_is_aborted_is_noticed():
    with pytest.raises(HangError, match="The process ended with -6"):
        _watch("os.abort()")


@pytest.mark.slow
def test_random_trainings_end():
    command = [sys.executable, "-m", "tests.support.stress", "--seconds", "15"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [*command, "--devices", "8"], capture_output=True, text=True, cwd=root, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " steps, at most " in done.stdout.split("8 devices: ")[1]
