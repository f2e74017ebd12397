"""Several processes that train one model together, and what one sees of another's fate."""

import json
import signal
import time

import jax
import numpy as np
import pytest
from support import process_script as script
from support.cluster_attacks.on_jax import attack_all
from support.process_runs import running
from support.worker_processes import free_port

from keras_multigpu import make_parallel
from keras_multigpu.cluster import ClusterError, join
from keras_multigpu.engines import joint
from keras_multigpu.engines.jax.cluster import board, processes
from keras_multigpu.engines.jax.cluster.group import Group


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
    script.keras.utils.set_random_seed(7)
    return script.train(script.build())


def test_two_processes_compute_what_one_device_does(together, alone):
    founds, _, _ = together
    for found in founds:
        assert {key for key in found if key in alone} == set(alone)
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)
    for key in alone:
        np.testing.assert_array_equal(founds[0][key], founds[1][key], err_msg=key)


def test_devices_are_numbered_through_all_processes(together):
    for number, found in enumerate(together[0]):
        own, others = (
            np.split(found["hosts"], 2) if not number else np.split(found["hosts"], 2)[::-1]
        )
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


def test_other_data_are_noticed(together):
    for status, output in together[1].values():
        assert status == 1, output
        assert "(process 1, pid " in output
        assert "Its rows and those of process 0 differ at step 1. Give the same data" in output


@pytest.mark.slow
def test_another_number_of_processes(tmp_path):
    with running("other_count", tmp_path) as run:
        for status, output in run.end().values():
            assert status == 1, output
            assert "(process 1, pid " in output
            assert "It has num_processes 3, and process 0 on " in output
            assert "Make them equal, and start all processes again." in output


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
    """And before, numbers and a port that are in use disturb no training."""
    with running("train_long", tmp_path) as run:
        run.await_line(1 - victim, "batch")
        if victim:
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
    assert f"(process 1, pid {run.processes[1].pid}): It has given no sign of life for" in output
    assert (tmp_path / "backup").exists()
    with running("train_backed_up", tmp_path, address=f"[::1]:{free_port()}") as run:
        for status, output in run.end().values():
            assert status == 0, output
            assert "epoch 19" in output
            assert "epoch 1\n" not in output
    script.keras.utils.set_random_seed(7)
    undisturbed = script.build(dropout=0.0)
    script.train_in_order(undisturbed)
    for number in (0, 1):
        found = np.load(tmp_path / f"trained{number}.npz").values()
        for weight, expected in zip(found, undisturbed.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_without_the_first_process_jax_ends_the_others(tmp_path):
    with running("train_long", tmp_path) as run:
        run.await_line(1, "batch")
        run.processes[0].kill()
        begun = time.monotonic()
        status, output = run.end(1)[1]
    assert status in (1, -signal.SIGABRT), output
    assert "(process 0, pid" in output or "JAX distributed service" in output
    assert time.monotonic() - begun < script.TIMEOUT + 60


@pytest.mark.slow
def test_absent_processes(tmp_path):
    with running("absent", tmp_path, [0]) as run:
        status, output = run.end()[0]
    assert status == 1, output
    assert f"{run.address}: Not all processes joined there in time" in output
    assert "absent: process 1" in output
    assert "Start all processes with the same `coordinator`" in output


class Told:
    """A board on which others have written already."""

    def __init__(self, **others):
        self.entries = {key.replace("__", "/"): value for key, value in others.items()}
        self.silences = {}

    def write(self, key, value):
        self.entries[key] = value

    def read(self, prefix, seconds=0.0):
        return {k.removeprefix(prefix): v for k, v in self.entries.items() if k.startswith(prefix)}

    def silence(self, number):
        return self.silences.get(number, 0.0)

    def service_silence(self):
        return 0.0

    def stop(self, seconds):
        self.entries["stopped"] = "yes"


def group_of(told, number=0):
    return Group(told, number, ("a (process 0)", "b (process 1)"), timeout=5.0)


def test_another_model_is_noticed():
    tanh, relu = meeting_facts(script.build()), meeting_facts(script.build("relu"))
    assert tanh == meeting_facts(script.build())
    told = Told(loops__1__1=json.dumps({"call": "fit", **relu}))
    with pytest.raises(ClusterError, match="Its model is .*. In process 0 it is ") as caught:
        group_of(told).begin("fit", tanh)
    assert caught.value.host == "b (process 1)"
    assert "Run the same script in all processes" in caught.value.cure


def meeting_facts(model):
    return {"model": joint.describe(model)[-8:]}


def test_another_call_is_noticed():
    group = group_of(Told(loops__1__1=json.dumps({"call": "evaluate"})))
    with pytest.raises(ClusterError, match="Its call is evaluate. In process 0 it is fit. Run"):
        group.begin("fit", {})
    with pytest.raises(ClusterError, match="Its call is evaluate"):
        group.begin("fit", {})  # what is broken stays so


def test_other_lengths_of_data_are_noticed():
    told = {"loops__1__1": json.dumps({"call": "fit"}), "ends__1__1": "1"}
    for meet_again in (Group.end, Group.check):
        group = group_of(Told(**told))
        group.begin("fit", {})
        group.count_step()
        group.count_step()
        with pytest.raises(ClusterError, match="It ended a loop after 1 steps, and others aft"):
            meet_again(group)


def test_what_is_lost_is_named():
    group = group_of(Told(ended__1="ended"))
    with pytest.raises(ClusterError, match=r"^b \(process 1\): It has ended. Start the script"):
        group.check()
    told = Told()
    told.silences[1] = 7.0
    with pytest.raises(ClusterError, match="It has given no sign of life for 7 seconds"):
        group_of(told).check()
    with pytest.raises(ClusterError, match="no sign of life"):
        group_of(told).begin("fit", {})


def test_the_first_process_leaves_when_the_others_are_silent():
    """They have said that they end, but still need its service until they have disconnected."""
    told = Told(ended__1="ended")
    silences = iter([0.0, 0.5, 2.0, 3.5])
    told.silence = lambda number: next(silences)
    group_of(told).leave()
    assert list(silences) == []
    assert told.entries["ended/0"] == "ended"
    assert told.entries["stopped"] == "yes"


class SlowService:
    """JAX's client of a service at the end of a slow link."""

    calls = 0

    def key_value_set(self, key, value, allow_overwrite):
        self.calls += 1
        time.sleep(0.1)

    def key_value_dir_get(self, key):
        return []


def test_no_call_is_left_when_a_process_ends():
    """Python would end the thread when the call comes back, and C++ abort the process."""
    service = SlowService()
    one = board.Board(service, 0)
    while not service.calls:
        time.sleep(0.001)
    one.stop(60.0)
    assert not one._thread.is_alive()
    assert service.calls == 1


def test_an_error_of_jax_is_explained_or_stays():
    told = Told()
    told.silences[1] = 4.5
    with (
        pytest.raises(ClusterError, match="It has given no sign of life for 4 seconds"),
        group_of(told).explained(),
    ):
        raise jax.errors.JaxRuntimeError("Connection reset by peer")
    group = Group(Told(), 0, ("a", "b"), timeout=-3.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), group.explained():
        raise jax.errors.JaxRuntimeError("out of memory")


def test_a_process_that_does_not_come_is_told_of(monkeypatch):
    told = Told()
    group = Group(told, 0, ("a", "b"), timeout=0.0)
    came = []

    def read(prefix, seconds=0.0):
        came.append(prefix)
        if len(came) > 5:
            told.entries["loops/1/1"] = json.dumps({"call": "fit"})
        return Told.read(told, prefix)

    monkeypatch.setattr(told, "read", read)
    with pytest.warns(UserWarning, match="waited 0 seconds for b: alive, but not at the same call"):
        group.begin("fit", {})


def test_old_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda coordinator_address: None)
    with pytest.raises(RuntimeError, match="`join` needs JAX 0.8.1 or later.*__version__="):
        processes._check_version()


def test_other_weights_are_noticed():
    error = group_of(Told()).differs(1, "weights")
    assert "Its weights and those of process 0 differ at step 0. Build the model" in str(error)


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
    names = (
        "stopped_for_a_second", "garbage", "restarted", "interrupted", "both_interrupted",
        "slow_link", "large",
    )  # fmt: skip
    for row in attack_all(1, names, gigabytes=0.125):
        assert not row.broken, str(row)
        (outcome,) = row.outcomes
        assert "exit status" not in outcome, str(row)
        assert row.longest < 60 or row.attack == "large", str(row)
