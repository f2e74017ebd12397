"""Reports on what only TensorFlow has: `tf.data`, and GPUs that are split into virtual ones."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # noqa: TID251

from keras_multigpu import engines, make_parallel, reports
from keras_multigpu.engines.tensorflow.counting import transfers
from keras_multigpu.engines.tensorflow.counting.step_graph import StepGraph


def test_a_dataset():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones((20, 3)), np.ones((20, 1))))
    report = reports.scaling(model, rows.batch(8), (1, 2), repeats=1, verbose=0)
    assert [run.steps for run in report.runs] == [3, 3]
    report = reports.scaling(model, rows.batch(8).repeat(), (1,), repeats=1, steps=2, verbose=0)
    assert [run.steps for run in report.runs] == [2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpu:0", "NVIDIA A"),
        ("gpu:1", "NVIDIA A"),
        ("/job:localhost/replica:0/task:0/device:GPU:2", "GPU"),
        ("gpu:2", "GPU"),  # a driver that tells no name
        ("gpu:9", "GPU"),
        ("/job:worker/replica:0/task:1/device:CPU:0", "CPU"),
    ],
)
def test_describe_device(monkeypatch, name, text):
    first, second = types.SimpleNamespace(parts=[1, 2]), types.SimpleNamespace(parts=None)
    details = {id(first): {"device_name": "NVIDIA A"}, id(second): {}}
    config = tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: [first, second])
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda one: one.parts)
    monkeypatch.setattr(config.experimental, "get_device_details", lambda one: details[id(one)])
    assert engines.current().describe_device(name) == text


def test_nothing_is_collected_after_a_report():
    """TensorFlow would keep the graph of each function that runs later, as long as the process."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    report = reports.transfers(make_parallel(model, 2), np.ones((4, 4), "float32"))
    assert sum(report.bytes("prediction").values()) > 0
    tf.function(lambda x: x + 1)(tf.constant(1.0))
    assert not context.context().export_run_metadata().function_graphs


def test_a_gpu_and_its_host_are_one_device(monkeypatch):
    gpus = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(2)]
    graph = tf.compat.v1.GraphDef()
    node = graph.node.add(op="Const", name="number")
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(3))
    for target in gpus:
        sent = graph.node.add(op="_HostSend", name=f"to_{target[-1]}", input=["number"])
        sent.attr["T"].type = tf.int32.as_datatype_enum
        for name, value in (
            ("tensor_name", "a"),
            ("send_device", gpus[0]),
            ("recv_device", target),
        ):
            sent.attr[name].s = value.encode()
        sent.attr["send_device_incarnation"].i = 1
    step = StepGraph([graph], tf.compat.v1.GraphDef().library)
    monkeypatch.setattr(transfers, "graph_of_step", lambda run: step)
    found = transfers.count_transfers(lambda: None)
    assert [(one.source, one.target, one.bytes) for one in found] == [("gpu:0", "gpu:1", 4)]
