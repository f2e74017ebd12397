"""Reports on what JAX tells of a device."""

import types

from keras_multigpu import engines


def test_describe_device(monkeypatch):
    device = types.SimpleNamespace(device_kind="NVIDIA A")
    monkeypatch.setattr("keras_multigpu.engines.jax.devices.find", lambda name: device)
    assert engines.current().describe_device("gpu:1") == "NVIDIA A"
    assert engines.current().describe_device("cpu:1") == "CPU"
