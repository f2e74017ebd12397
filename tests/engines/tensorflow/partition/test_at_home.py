"""Under XLA: what one device computes between crossings is compiled, in the order of one device."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu.engines.tensorflow.partition.step import spread

DEVICES = [f"/device:CPU:{number}" for number in range(3)]


def _built(compiled, optimizer):
    """A step with an optimizer, in a graph of its own."""
    model = keras.Sequential([keras.Input((6,)), *[layers.Dense(5) for _ in range(3)]])
    model.compile(optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(np.zeros((1, 6)), np.zeros((1, 5)))  # makes the metrics

    @tf.function(autograph=False)
    def step(x, y):
        return spread(lambda *data: model.train_step(data), (x, y), DEVICES, compiled=compiled)

    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 5])
    return step.get_concrete_function(*spec).graph


def _roots(graph, is_compiled=False):
    """How many functions have square roots: by whether XLA compiles them, or calls them."""
    found = collections.Counter()
    found[is_compiled] += any(op.type == "Sqrt" for op in graph.get_operations())
    for op in graph.get_operations():
        inside = is_compiled or op.node_def.attr["_XlaMustCompile"].b
        for value in op.node_def.attr.values():
            for one in [value.func, *value.list.func]:
                called = graph._get_function(one.name) if one.name else None
                if called is not None:
                    found += _roots(called.graph, inside)
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_is_a_few_functions(compiled, scaled):
    """Of all weights together: the norm, what slots add, the new weights."""
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    if scaled:  # the update is in a branch
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    found = _roots(_built(compiled, optimizer))
    assert 1 <= found[compiled] <= 3
    assert not found[not compiled]


class Counting(keras.Model):
    """Reads a variable and changes it, in turns, between sums over the rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.seen = self.add_weight(shape=(3,), trainable=False, name="seen")
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        logs = super().train_step((x / self.scale, y))
        for turn in range(6):
            mean = keras.ops.mean(x[:, :3], axis=0) * self.scale + turn
            for _ in range(6):
                mean = keras.ops.tanh(mean * self.seen + 0.3) + keras.ops.exp(-mean)
            self.seen.assign(0.5 * self.seen + mean)
            self.scale.assign_add(0.1 * keras.ops.sum(self.seen) / (1 + turn))
            self.seen.assign_add(self.scale * mean)
        return {**logs, "seen": keras.ops.sum(self.seen * self.scale)}


@pytest.mark.parametrize("scaled", [False, True])
def test_variables_change_in_order(scaled, both, in_float64, rng):
    x, y = rng.normal(size=(23, 6)), rng.normal(size=(23, 3))

    def use(model):
        optimizer = keras.optimizers.Adam(0.01)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2)
        model.compile(optimizer, "mse", jit_compile=True)
        logs = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        return [*model.get_weights(), *map(np.array, logs.values())]

    for one, other in zip(*both(Counting, use, n=3)):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
