"""What joined processes do on JAX alone; `tests/cluster` has what both backends do."""

import signal
import time

import jax
import numpy as np
import pytest
from support import large_sums
from support import process_script as script
from support.boards import Told
from support.cluster_attacks.on_jax import attack_all
from support.process_runs import run_to_end, running

from keras_multigpu import make_parallel
from keras_multigpu.cluster import ClusterError, join
from keras_multigpu.engines.jax.cluster import processes
from keras_multigpu.engines.jax.cluster.processes import Group


@pytest.mark.slow
def test_without_the_first_process_the_others_end(tmp_path):
    with running("train_long", tmp_path) as run:
        run.await_line(1, "batch")
        run.processes[0].kill()
        begun = time.monotonic()
        status, output = run.end(1)[1]
    assert status in (1, -signal.SIGABRT), output
    assert "(process 0, pid" in output or "JAX distributed service" in output
    assert time.monotonic() - begun < script.TIMEOUT + 60


def test_an_error_of_jax_is_explained_or_stays():
    told = Told()
    told.silences[1] = 4.5
    with (
        pytest.raises(ClusterError, match="It has given no sign of life for 4 seconds"),
        Group(told, 0, ("a (process 0)", "b (process 1)"), timeout=5.0).explained(),
    ):
        raise jax.errors.JaxRuntimeError("Connection reset by peer")
    group = Group(Told(), 0, ("a", "b"), timeout=-3.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), group.explained():
        raise jax.errors.JaxRuntimeError("out of memory")


def test_old_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda coordinator_address: None)
    with pytest.raises(RuntimeError, match="`join` needs JAX 0.8.1 or later.*__version__="):
        processes._check_version()


def test_processes_joined_by_others_are_refused(monkeypatch):
    monkeypatch.setattr(processes.jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="Processes are joined by `keras_multigpu.cluster.join`"):
        make_parallel(script.build())


def test_joining_too_late():
    make_parallel(script.build()).predict(np.ones((1, 6)), verbose=0)
    with pytest.raises(RuntimeError, match="`join` must come once in a process, .* process_id=0"):
        join("127.0.0.1:2345", 1, 0)


@pytest.mark.slow
def test_attacks():
    """Attacks that no other test makes, once: all end in time, and leave nothing broken."""
    names = ("stopped_for_a_second", "garbage", "restarted", "interrupted", "both_interrupted")
    for row in attack_all(1, (*names, "slow_link", "large"), gigabytes=0.125):
        assert not row.broken, str(row)
        (outcome,) = row.outcomes
        assert "exit status" not in outcome, str(row)
        assert outcome.count("second fit: ClusterError") == 2 * ("interrupted" in row.attack)
        assert row.longest < 60 or row.attack == "large", str(row)


@pytest.mark.slow
def test_sums_of_large_arrays(tmp_path):
    run_to_end(large_sums.__file__, tmp_path, "1,1")
