"""A training step of one's own in tower mode and model mode, by `parallel.function`."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference

from keras_multigpu import make_parallel

WAYS = [
    {"mode": "tower"},
    {"mode": "tower", "replicas": "independent"},
    {"mode": "model"},
    {"mode": "model", "placement": "spread"},
]


def _model():
    keras.utils.set_random_seed(4)
    wide = [layers.Dense(256, "relu"), layers.Dense(256, "tanh")]
    return keras.Sequential([keras.Input((6,)), *wide, layers.Dense(2)])


def _step(model):
    """The gradients of a loss, and the outputs, on the backend."""

    def loss_of(outputs, y):
        return ops.mean((outputs - y) ** 2)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def step(x, y):
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                loss = loss_of(outputs, y)
            return outputs, tape.gradient(loss, [one.value for one in model.trainable_variables])

        return step
    import jax

    def of_weights(weights, x, y):
        rest = [one.value for one in model.non_trainable_variables]
        outputs, _ = model.stateless_call(weights, rest, x, training=True)
        return loss_of(outputs, y), outputs

    def step(x, y):
        weights = [one.value for one in model.trainable_variables]
        gradients, outputs = jax.grad(of_weights, has_aux=True)(weights, x, y)
        return outputs, gradients

    return step


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_of_ones_own_step(way, jit_compile, rng):
    x = rng.normal(size=(7, 6)).astype("float32")
    y = rng.normal(size=(7, 2)).astype("float32")
    parallel = make_parallel(_model(), 2, **way)
    outputs, gradients = parallel.function(_step(parallel), jit_compile=jit_compile)(x, y)
    if "replicas" not in way:  # shared replicas without random numbers are equal
        expected = _step(_model())(ops.convert_to_tensor(x), ops.convert_to_tensor(y))
        assert difference(expected, (outputs, gradients)) < 1e-5
        return
    values = [np.asarray(member(x)) for member in parallel.replicas]
    assert difference(np.mean(values, axis=0), outputs) < 1e-5
    # JAX has the members' weights stacked. The last biases have 2 numbers for each member.
    biases = [np.reshape(one, (-1, 2)) for one in gradients if np.size(one) in (2, 4)]
    slope = ops.convert_to_tensor(outputs) - y  # of the loss by the mean, but for a factor
    expected = ops.sum(slope, axis=0) / len(x)  # over the members, whose mean it is
    assert difference(expected, np.sum(np.concatenate(biases), axis=0)) < 1e-6


class MetricsOfCompile(keras.Model):
    """Its metrics are made in `compile`, as those of many published classes are."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(64)

    def call(self, inputs):
        return self.dense(inputs)[:, :3]

    def compile(self, **settings):
        super().compile(loss="mse", **settings)
        self.tracker = keras.metrics.Mean(name="mean_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.tracker.update_state(loss)
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard": "weights"},
        {"model_devices": 2},
        {"mode": "model"},
        {"mode": "tower", "replicas": "independent", "loss_of": "mix"},
    ],
    ids=str,
)
def test_metrics_that_compile_makes(options):
    x = np.ones((10, 6), "float32")
    parallel = make_parallel(MetricsOfCompile(), 4, **options)
    parallel.compile(optimizer="sgd")
    history = parallel.fit(x, x[:, :3], verbose=0).history
    assert history["mean_loss"][0] > 0
