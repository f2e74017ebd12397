"""Where a committee's weights are, and what crosses between the devices in a training step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel

FEATURES, UNITS, ROWS = 7, 301, 32


def _device(variable):
    return variable.value.device[-5:]


def _committee(template, n=4, **options):
    return make_parallel(template, n, mode="tower", replicas="independent", **options)


def _built():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(UNITS, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )


class Subclassed(keras.Model):
    """Its weights are made in the first call."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(UNITS, "tanh"), layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@pytest.mark.parametrize("make", [_built, Subclassed])
@pytest.mark.parametrize("first_use", ["fit", "predict", "call"])
def test_weights_and_slots_are_on_their_replicas_devices(make, first_use):
    parallel = _committee(make())
    parallel.compile("adam", "mse")
    x, y = np.ones((ROWS, FEATURES), "float32"), np.ones((ROWS, 1), "float32")
    if first_use == "predict":
        parallel.predict(x, verbose=0)
    elif first_use == "call":
        parallel(x)
    parallel.fit(x, y, verbose=0)
    for number, model in enumerate(parallel.replicas):
        assert model.variables
        assert {_device(variable) for variable in model.variables} == {f"CPU:{number}"}
    slots = [variable for variable in parallel.optimizer.variables if len(variable.shape)]
    per_replica = 2 * len(parallel.template.trainable_variables)
    for number in range(4):
        assert sum(_device(slot) == f"CPU:{number}" for slot in slots) == per_replica


def _sent(function, folder):
    """The tensors that cross between devices when a function runs for the first time."""
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default():
        tf.summary.trace_on(graph=True, profiler=False)
        function()
        tf.summary.trace_export("step", step=0)
    writer.close()
    (file,) = folder.iterdir()
    sent = set()
    for record in tf.data.TFRecordDataset(str(file)):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            for text in value.tensor.string_val:
                metadata = tf.compat.v1.RunMetadata.FromString(text)
                for function_graphs in metadata.function_graphs:
                    for graph in function_graphs.partition_graphs:
                        sends = [node for node in graph.node if "Send" in node.op]
                        sent |= {_tensor(n) for n in sends if "ctrl" not in n.input[0]}
    return sent


def _tensor(node):
    ways = [node.attr[f"{end}_device"].s.decode()[-5:] for end in ("send", "recv")]
    return tuple(ways), node.input[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("make", [_built, Subclassed])
def test_no_weight_and_no_gradient_crosses(make, optimizer, tmp_path):
    parallel = _committee(make())
    parallel.compile(optimizer, "mse")
    x, y = np.ones((ROWS, FEATURES), "float32"), np.ones((ROWS, 1), "float32")
    parallel.predict(x, verbose=0)
    sent = _sent(lambda: parallel.train_on_batch(x, y), tmp_path)
    home = "CPU:0"
    for device in ("CPU:1", "CPU:2", "CPU:3"):
        # Back come the outputs, and the penalty of the one regularizer where there is one.
        back = [name for way, name in sent if way == (device, home)]
        assert len(back) == (2 if make is _built else 1), back
        # There go the batch, the outputs' gradient, and scalars that the optimizer keeps.
        there = [name for way, name in sent if way == (home, device)]
        scalars = ("/Add", "/Cast", "/ReadVariableOp")
        tensors = [n for n in there if not (optimizer in n and any(s in n for s in scalars))]
        # What the initializers were given when the weights of a subclassed model were made.
        tensors = [n for n in tensors if n not in ("seed", "alg", "dims", "shape")]
        assert len(tensors) == 2, tensors
    assert {home} == {end for way, _ in sent for end in way} - {"CPU:1", "CPU:2", "CPU:3"}
    assert all(home in way for way, _ in sent)
