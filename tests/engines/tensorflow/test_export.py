"""Exported for serving: the template's graph."""

import keras
import numpy as np
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
