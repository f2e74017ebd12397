"""What XLA does not partition is spread over the devices all the same, to the same numbers."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference
from support.precision import double_precision

from keras_multigpu import make_parallel
from keras_multigpu.engines.jax.counting.transfers import count_collectives

pytestmark = pytest.mark.thin(10)


class Apply(layers.Layer):
    """A function of the inputs and a square weight."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal")

    def call(self, inputs):
        return self.function(inputs, self.kernel)


def _fourier(x, kernel):
    return ops.abs(jax.numpy.fft.fft2(x @ kernel, norm="ortho"))


def _real_fourier(x, kernel):
    real, imaginary = ops.rfft(x @ kernel)
    return real[..., :4] * imaginary[..., 1:]


def _symmetric(x, kernel):
    y = x @ kernel
    return y @ ops.transpose(y, (0, 2, 1)) / 4 + 2 * ops.eye(x.shape[1], dtype=x.dtype)


def _each_row(x, kernel):
    return ops.map(lambda row: ops.relu(row @ kernel) @ row.T, x)


def _scanned(x, kernel):
    def step(state, row):
        state = ops.relu(ops.conv(row, kernel[:3, :4][:, :, None] * ops.ones((1, 1, 8))) + state)
        return state, state

    return ops.scan(step, ops.zeros_like(x[:, :6]), ops.stack([x, x * 2]))[0]


def _largest_neighbour(x, kernel):
    """Of three rows."""
    window, strides = (3, 1, 1), (1, 1, 1)
    largest, below = jax.lax.max, -np.inf
    return jax.lax.reduce_window(ops.tanh(x @ kernel), below, largest, window, strides, "SAME")


FUNCTIONS = {
    "fft2": _fourier,
    "rfft": _real_fourier,
    "cholesky": lambda x, kernel: ops.cholesky(_symmetric(x, kernel)),
    "inv": lambda x, kernel: ops.inv(_symmetric(x, kernel)),
    "eigh": lambda x, kernel: ops.eigh(_symmetric(x, kernel))[0],
    "svd": lambda x, kernel: ops.svd(_symmetric(x, kernel), compute_uv=False),
    "qr": lambda x, kernel: ops.qr(_symmetric(x, kernel))[1],
    "solve": lambda x, kernel: ops.solve(_symmetric(x, kernel), x),
    "map": _each_row,
}
LAYERS = {
    "groups_1d": (
        (12, 8),
        lambda: [layers.Conv1D(8, 3, groups=4, padding="causal", dilation_rate=2)],
    ),
    "groups_2d": ((6, 6, 8), lambda: [layers.Conv2D(16, 3, groups=2, strides=2, padding="same")]),
    "groups_3d": ((4, 4, 4, 4), lambda: [layers.Conv3D(4, 2, groups=2)]),
    "depthwise": ((6, 6, 4), lambda: [layers.DepthwiseConv2D(3, depth_multiplier=2)]),
    "separable": ((12, 4), lambda: [layers.SeparableConv1D(8, 3)]),
    "twice": (
        (6, 6, 8),
        lambda: [
            layers.Conv2D(8, 3, groups=4, activation="relu"),
            layers.Conv2D(8, 3, groups=8, activation="relu"),
            layers.Dropout(0.3, seed=3),
        ],
    ),
    "of_time": ((3, 6, 6, 8), lambda: [layers.TimeDistributed(layers.Conv2D(8, 3, groups=4))]),
    "stft": ((64, 1), lambda: [layers.STFTSpectrogram(frame_length=16, frame_step=8)]),
    **{name: ((8, 8), lambda f=f: [Apply(f)]) for name, f in FUNCTIONS.items()},
    "in_a_loop": ((8, 8), lambda: [Apply(_scanned)]),
    "over_rows": ((8, 8), lambda: [Apply(_largest_neighbour)]),
}
# Fewer operations are counted where a program of several devices has other ones beside.
# The gradient of a `map` goes round in a loop on every device: docs/spread_on_jax.md.
SPREAD = [name for name in LAYERS if name not in ("in_a_loop", "map", "over_rows")]


def _build(name):
    shape, parts = LAYERS[name]
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input(shape), *parts(), layers.Flatten(), layers.Dense(2), layers.Dense(1)]
    )


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with double_precision():
        yield


@pytest.mark.parametrize("name", LAYERS)
def test_same_numbers(name, rng, float64):
    x = rng.normal(size=(16, *LAYERS[name][0]))
    y = rng.normal(size=(16, 1))
    results = []
    for n in (None, 4):
        model = _build(name)
        model = model if n is None else make_parallel(model, n)
        model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse", metrics=["mae"])
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append([logs, model.predict(x, 8, verbose=0), model.get_weights()])
    assert difference(results[0], results[1]) < 1e-10


def _flops_and_collectives(model, x, y, is_parallel):
    found = []
    for is_training in (True, False):
        lists = [model.trainable_variables, model.non_trainable_variables]
        lists += [model.optimizer.variables, model.metrics_variables] if is_training else []
        state = tuple([variable.value for variable in one] for one in lists)
        batch = (x, y) if is_training else (x,)
        if is_parallel:
            place = model._parallel_steps.where
            state, batch = place.put_state(state), place.put_batch(batch)
        step = model.train_step if is_training else model.predict_step
        compiled = jax.jit(step).lower(state, batch).compile()
        crossing = count_collectives(compiled.as_text(), model.devices) if is_parallel else []
        found.append((compiled.cost_analysis()["flops"], crossing))
    return found


@pytest.mark.parametrize("name", SPREAD)
def test_each_device_has_its_share(name, rng):
    x = rng.normal(size=(32, *LAYERS[name][0])).astype("float32")
    y = np.ones((32, 1), "float32")
    costs = []
    for n in (None, 4):
        model = _build(name) if n is None else make_parallel(_build(name), n)
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)
        costs.append(_flops_and_collectives(model, x, y, n is not None))
    for (alone, _), (own, crossing) in zip(*costs):
        assert own < 0.35 * alone
        assert not [one for one in crossing if "all-gather" in one.tensor]
