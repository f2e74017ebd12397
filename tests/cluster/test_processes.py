"""Several processes that train one model together, and what one sees of another's fate."""

import shutil
import signal

import keras
import numpy as np
import pytest
from support import process_script as script
from support.process_runs import running
from support.worker_processes import free_port

from keras_multigpu import make_parallel

_ON_JAX = keras.backend.backend() == "jax"
# JAX has no other quick test of processes; TensorFlow's collectives are also tested in one process.
pytestmark = [] if _ON_JAX else pytest.mark.slow


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes with two devices each found, and what they printed."""
    folder = tmp_path_factory.mktemp("together")
    with running("train_together", folder) as run:
        ended = run.end()
    for number in (0, 1):
        assert (folder / f"found{number}.npz").exists(), ended[number][1]
    return [dict(np.load(folder / f"found{number}.npz")) for number in (0, 1)], ended, folder


@pytest.fixture(scope="module")
def alone():
    """What one device finds."""
    keras.utils.set_random_seed(7)
    return script.train(script.build(), script.build())


def test_two_processes_compute_what_one_device_does(together, alone):
    founds, _, _ = together
    for key in founds[0]:
        if key != "hosts" and not key.startswith("refusal"):
            np.testing.assert_array_equal(founds[0][key], founds[1][key], err_msg=key)
    for found in founds:
        assert {key for key in found if key in alone} == set(alone)
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)


def test_devices_are_numbered_through_all_processes(together):
    for number, found in enumerate(together[0]):
        own, others = np.split(found["hosts"], 2)[:: -1 if number else 1]
        assert list(own) == ["", ""]
        assert all(f"(process {1 - number}, pid " in host for host in others)
        assert list(found["devices"]) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
        assert list(found["loaded devices"]) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.mark.slow
def test_one_process_writes_files_that_all_read(together):
    founds, _, folder = together
    for pattern in ("latest*.h5", "log*.csv", "by*.h5"):
        (written,) = folder.glob(pattern)
        assert written.name.startswith(pattern.replace("*", "0").split(".")[0]), written
    for found in founds:
        np.testing.assert_array_equal(found["loaded predicted"], founds[0]["loaded predicted"])
        np.testing.assert_allclose(
            found["template predicted"], found["loaded predicted"], rtol=1e-5, atol=1e-6
        )
    model = script.build()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "saved.weights.h5")
    again = model.predict(script.data()[0][:6], verbose=0)
    np.testing.assert_allclose(again, founds[0]["loaded predicted"], rtol=1e-5, atol=1e-6)


def test_what_does_not_go_over_processes_is_refused(together):
    for number, found in enumerate(together[0]):
        for mode in ("tower", "model"):
            text = str(found[f"refusal {mode} None"])
            assert "Only mode 'data' can use several processes" in text
            assert f"Received: mode='{mode}'" in text
        if number:
            text = str(found["refusal data 2"])
            assert "at least one device of every process" in text
            assert "with none of process 1. This is process 1" in text
        text = str(found["refusal function"])
        assert "`parallel.function` needs devices of one process" in text


def test_other_data_are_noticed(together):
    for status, output in together[1].values():
        assert status == 1, output
        assert "(process 1, pid " in output
        assert "Its rows and those of process 0 differ at step 1. Give the same data" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("other_weights", "Its weights and those of process 0 differ at step"),
        (
            "other_options",
            "Its set of options is [('model_devices', 1), "
            f"('shard', {'optimizer' if _ON_JAX else None!r}), ('wire",
        ),
        ("other_end", "Its weights and those of process 0 differ at step"),
        ("other_length", "It is at the end of `fit`, after 2 steps, and process 0 is at step 3"),
        (
            "other_steps",
            "It makes another step than process 0 at step 2: its is "
            + ("'a test_step before which" if _ON_JAX else "'test_step', and"),
        ),
        ("parts_of_other_rows", "Its part of a batch does not fit to that of process 0 at step 1"),
        (
            "parts_of_other_length",
            "It makes another step than process 0 at step"  # it has new metrics, of an epoch
            if _ON_JAX
            else "It is at another place in its data than process 0 at step 3: a",
        ),
        ("other_count", "It has num_processes 3, and process 0 on "),
    ],
)
def test_processes_that_differ_are_named(scenario, expected, tmp_path):
    with running(scenario, tmp_path) as run:
        for status, output in run.end().values():
            assert status == 1, output
            assert "(process 1, pid " in output
            assert expected in output


@pytest.mark.slow
def test_a_process_ends_by_the_signal_of_schedulers(tmp_path):
    with running("terminated", tmp_path) as run:
        ended = run.end()
    assert ended[1][0] == -signal.SIGTERM
    status, output = ended[0]
    assert status == 1, output
    assert "(process 1, pid " in output


@pytest.mark.slow
def test_absent_processes(tmp_path):
    with running("absent", tmp_path, [0]) as run:
        status, output = run.end()[0]
    assert status == 1, output
    assert f"{run.address}: Not all processes joined there in time" in output
    assert "absent: process 1" in output
    assert "Start all processes with the same `coordinator`" in output


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others(tmp_path):
    with running("full_disk", tmp_path) as run:
        ended = run.end()
    assert "OSError: [Errno 28] No space left on device" in ended[0][1]
    status, output = ended[1]
    assert status == 1, output
    assert "(process 0, pid " in output
    assert "It has stopped with OSError: [Errno 28] No space left on device. Start" in output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_is_named(victim, tmp_path):
    """And before, on JAX, numbers and a port that are in use disturb no training."""
    with running("train_long", tmp_path) as run:
        run.await_line(1 - victim, "batch")
        if victim and _ON_JAX:
            _refuse_others(run, tmp_path)
        run.processes[victim].send_signal(signal.SIGSTOP)
        (ended,) = run.end(1 - victim).values()
    status, output = ended
    assert status == 1, output
    assert f"(process {victim}, pid {run.processes[victim].pid})" in output
    assert "It has given no sign of life for" in output
    assert "Check that host. Start the script again in all processes" in output


def _refuse_others(run, folder):
    with running("late", folder, address=run.address) as second:
        ended = second.end()
    for number, told in [
        (0, "Address already in use"),
        (1, "another program, or a training that has begun"),
    ]:
        status, output = ended[number]
        assert status == 1, output
        assert f"{run.address}: " in output
        assert told in output
    assert all(process.poll() is None for process in run.processes.values())


@pytest.mark.slow
def test_training_goes_on_after_a_process_was_killed(tmp_path):
    with running("train_backed_up", tmp_path) as run:
        run.await_line(0, "epoch 2")
        run.processes[1].kill()
        status, output = run.end(0)[0]
    assert status == 1, output
    told = f"(process 1, pid {run.processes[1].pid}): It has ended without a word"
    assert told in output
    assert (tmp_path / "backup").exists()
    shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    with running("train_backed_up", tmp_path, address=f"[::1]:{free_port()}") as run:
        for status, output in run.end().values():
            assert status == 0, output
            assert "epoch 19" in output
            assert "epoch 1\n" not in output
    keras.utils.set_random_seed(7)
    undisturbed = script.build(dropout=0.0)
    script.train_in_order(undisturbed)
    found = [list(np.load(tmp_path / f"trained{number}.npz").values()) for number in (0, 1)]
    # The backup of two processes is good for one, too.
    keras.utils.set_random_seed(7)
    resumed = make_parallel(script.build(dropout=0.0), 4)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "copy")
    script.train_in_order(resumed, [backup])
    for weights in [*found, resumed.get_weights()]:
        for weight, expected in zip(weights, undisturbed.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-5)
