"""BatchNormalization over the whole batch: forwards, backwards, and in its moving statistics."""

import keras
import pytest
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel


def _conv(synchronized=False, **options):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3)(x)
    x = layers.BatchNormalization(synchronized=synchronized, momentum=0.7, **options)(x)
    x = layers.Conv2D(4, 3, activation="tanh")(x)
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def _masked(synchronized=False):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(x)
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3)(x)))


def _data(build, rows, rng):
    if build is _conv:
        return rng.normal(size=(rows, 6, 6, 2)), rng.normal(size=(rows, 2))
    return rng.integers(0, 20, (rows, 7)), rng.normal(size=(rows, 2))


# On JAX, Keras refuses `synchronized=True`, and every layer sees the whole batch.
ASKS = ["layer", "option"] if keras.backend.backend() == "tensorflow" else ["option"]


@pytest.mark.thin(12)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("build", [_conv, _masked])
@pytest.mark.parametrize("n", [2, 4] if len(ASKS) > 1 else [4])
def test_one_devices_statistics(build, ask, n, rng):
    x, y = _data(build, 70, rng)
    plain = build()
    parallel = (
        make_parallel(build(synchronized=True), n)
        if ask == "layer"
        else make_parallel(build(), n, sync_batch_norm=True)
    )
    histories = []
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.05), "mse")
        history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        histories.append(history.history)
        for rows in (2, 5):
            model.train_on_batch(x[:rows], y[:rows])
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5
    outputs = [model.predict(x, verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < 2e-5


def test_steps_per_execution(rng):
    x, y = _data(_conv, 64, rng)
    plain, parallel = _conv(), make_parallel(_conv(), 4, sync_batch_norm=True)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=2)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
