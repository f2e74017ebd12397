"""Names of devices, of this process and of other machines."""

import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow import names

HERE = "/job:localhost/replica:0/task:0/device:"


@pytest.fixture(autouse=True)
def _no_machines(monkeypatch):
    monkeypatch.setattr(names, "_tasks", {})


def test_to_and_fro():
    assert names.full_name("gpu:1") == f"{HERE}GPU:1"
    assert names.full_name("b:2222/cpu:0") == "/job:worker/replica:0/task:0/device:CPU:0"
    assert names.full_name("a:2222/gpu:3") == "/job:worker/replica:0/task:1/device:GPU:3"
    assert names.full_name("/device:CPU:0") == "/device:CPU:0"
    for name in ("gpu:1", "b:2222/cpu:0", "a:2222/gpu:3"):
        assert names.short_name(names.full_name(name)) == name
    assert names.short_name("/device:CPU:0") == "cpu:0"
    assert names.short_name("/job:ps/task:0/device:CPU:0") == "/job:ps/task:0/device:CPU:0"


@pytest.mark.parametrize("text", ["CPU:0", "/CPU:0", "/device:CPU:0", f"{HERE}CPU:0", "cpu:0"])
def test_of_this_process(text):
    assert names.local_name(text) == "cpu:0"
    assert names.remote_name(text) is None


def test_of_another_machine():
    full = "/job:worker/replica:0/task:0/device:CPU:0"
    assert names.remote_name(full) is None  # of none that was ever connected
    assert names.task_of("b:2222") == 0
    assert names.remote_name(full) == names.remote_name("b:2222/cpu:0") == "b:2222/cpu:0"
    assert names.local_name(full) is None
    assert names.remote_name("tpu") is None


def test_the_host():
    first, second, other = map(names.full_name, ("a:1/gpu:0", "a:1/gpu:1", "b:1/gpu:0"))
    assert names.host_of(first) == names.host_of(second)
    assert names.host_of(first) != names.host_of(other)
    assert names.host_of(first) != names.host_of(names.full_name("gpu:0"))


def test_physical_devices_of_tensorflow(monkeypatch):
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(4)]
    divided = {gpus[2]: [tf.config.LogicalDeviceConfiguration(1)] * 2}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus[1:])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", divided.get)
    assert [names.name_of(one) for one in gpus] == [None, "gpu:0", None, "gpu:3"]
