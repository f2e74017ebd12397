"""Reports on what JAX tells of a device."""

import types

import keras
import numpy as np

from keras_multigpu import engines, make_parallel, reports


def test_describe_device(monkeypatch):
    device = types.SimpleNamespace(device_kind="NVIDIA A")
    monkeypatch.setattr("keras_multigpu.engines.jax.devices.find", lambda name: device)
    assert engines.current().describe_device("gpu:1") == "NVIDIA A"
    assert engines.current().describe_device("cpu:1") == "CPU"


def test_a_plan_leaves_the_weights_where_they_were():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    batch = np.ones((32, 64), "float32"), np.ones((32, 8), "float32")

    def held():
        return reports.memory(make_parallel(model, 4, shard="optimizer"), batch).peak

    before = held()
    reports.plan(model, 32, 4, memory="1 GB", link="nvlink4", step_seconds=0.1)
    assert all(len(one.value.sharding.device_set) == 1 for one in model.variables)
    make_parallel(model, 4, shard="weights")
    assert held() == before
