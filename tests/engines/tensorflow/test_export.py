"""Exported for serving, the template's graph; and checkpoints of TensorFlow's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel


def test_exported_for_serving(rng, tmp_path):
    x = rng.normal(size=(20, 6))
    template = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])
    parallel = make_parallel(template, 4)
    parallel.compile("adam", "mse")
    parallel.fit(x, rng.normal(size=(20, 2)), verbose=0)
    parallel.export(tmp_path / "served", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "served")
    served = np.asarray(loaded.serve(x.astype("float32")))
    assert difference(served, parallel.predict(x, verbose=0)) < 1e-6
    graph = (tmp_path / "served" / "saved_model.pb").read_bytes()
    assert b"CPU:1" not in graph
    assert b"CPU:3" not in graph


@pytest.mark.parametrize("options", [{}, {"shard": "weights"}, {"mode": "model"}])
@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_checkpoint_of_tensorflows_has_the_optimizer(options, is_read_first, rng, tmp_path):
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))

    def train(model, steps):
        model.fit(x, y, epochs=steps, batch_size=20, verbose=0)

    def build():
        dense = [layers.Dense(size, dtype="float64") for size in (400, 2)]
        return keras.Sequential([keras.Input((6,), dtype="float64"), *dense])

    first, second = build(), make_parallel(build(), 3, **options)
    first.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    train(first, 3)
    path = tf.train.Checkpoint(model=first).write(str(tmp_path / "checkpoint"))
    train(first, 3)
    if is_read_first:
        status = tf.train.Checkpoint(model=second).read(path)
    second.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    if not is_read_first:
        status = tf.train.Checkpoint(model=second).read(path)
    train(second, 3)
    status.assert_consumed()
    assert int(second.optimizer.iterations) == 6
    assert difference(first.get_weights(), second.get_weights()) < 1e-12


@pytest.mark.parametrize(
    "options",
    [{"shard": "weights"}, {"model_devices": 2}, {"mode": "model", "placement": "spread"}],
    ids=str,
)
def test_a_saved_model_of_weights_in_parts_is_refused(options, tmp_path):
    template = keras.Sequential([keras.Input((6,)), layers.Dense(512), layers.Dense(2)])
    parallel = make_parallel(template, 4, **options)
    text = r"kernel:0', in parts on [24] devices by `shard`, `model_devices` or .* Call `parallel"
    with pytest.raises(ValueError, match=text):
        tf.saved_model.save(parallel, tmp_path / "refused")
    template.save(tmp_path / "whole.keras")
    loaded = keras.saving.load_model(tmp_path / "whole.keras")
    tf.saved_model.save(loaded, tmp_path / "served")
