"""BatchNormalization over the whole batch: forwards, backwards, and in its moving statistics."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables
from support.precision import double_precision

from keras_multigpu import make_parallel

ON_JAX = keras.backend.backend() == "jax"


def _conv(**options):
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3)(x)
    x = layers.BatchNormalization(momentum=0.7, **options)(x)
    x = layers.Conv2D(4, 3, activation="tanh")(x)
    x = layers.BatchNormalization(**options)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def _first_axis():
    return _conv(axis=1, center=False)


def _without_weights():
    return _conv(center=False, scale=False)


def _renorm():
    return _conv(renorm=True, renorm_clipping={"rmax": 1.5, "rmin": 0.5, "dmax": 1.0})


def _masked():
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(x)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3)(x)))


def _called_twice():
    x = inputs = keras.Input((6,))
    block = keras.Sequential([layers.Dense(6), layers.BatchNormalization(momentum=0.5)])
    return keras.Model(inputs, layers.Dense(2)(block(layers.Dense(6, "tanh")(block(x)))))


def _branches():
    """Values cross several normalizations; losses and outputs come from different places."""
    x = inputs = keras.Input((6,))
    a = layers.BatchNormalization()(layers.Dense(5, activity_regularizer="l2")(x))
    b = layers.BatchNormalization()(layers.Dense(5)(x))
    a = layers.add([layers.BatchNormalization()(a), b, layers.Dense(5)(inputs)])
    return keras.Model(inputs, layers.Dense(2)(layers.concatenate([a, b, x])))


def _frozen():
    model = _conv()
    model.layers[2].trainable = False
    return model


class Subclass(layers.BatchNormalization):
    """Calls Keras's own with an argument changed."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs * 2, training=training, mask=mask) + self.beta


def _subclassed_layer():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(6), Subclass(scale=False), layers.Dense(2)]
    )


class Subclassed(keras.Model):
    """Its layers are built in the first call."""

    def __init__(self):
        super().__init__()
        self.norm, self.hidden, self.out = layers.BatchNormalization(), layers.Dense(3), None

    def build(self, shape):
        self.out = layers.Dense(2)

    def call(self, inputs, training=False):
        return self.out(self.norm(self.hidden(inputs), training=training))


BUILDS = [
    _conv,
    _first_axis,
    _without_weights,
    _renorm,
    _masked,
    _called_twice,
    _frozen,
    _branches,
    _subclassed_layer,
    Subclassed,
]
IMAGES = (_conv, _first_axis, _without_weights, _renorm, _frozen)


def _data(build, rows, rng):
    if build in IMAGES:
        return 1 + rng.normal(size=(rows, 6, 6, 2)), rng.normal(size=(rows, 2))
    if build is _masked:
        return rng.integers(0, 20, (rows, 7)), rng.normal(size=(rows, 2))
    return 1 + rng.normal(size=(rows, 6)), rng.normal(size=(rows, 2))


def _pair(build, n=4, **compile_options):
    models = []
    for parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = build()
        models.append(make_parallel(model, n) if parallel else model)
        models[-1].compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse", **compile_options)
    return models


def _compare(models, x, y, tolerance, **fit):
    """Trains with an incomplete batch, and with fewer rows than devices."""
    histories = []
    for model in models:
        keras.utils.set_random_seed(5)  # layers may be built now
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **fit)
        histories.append(history.history)
        model.train_on_batch(x[:2], y[:2])
    assert all(np.isfinite(one["loss"]).all() for one in histories)
    assert difference(*histories) < max(tolerance, 1e-6)  # Keras keeps its metrics in float32
    assert difference(*map(variables, models)) < tolerance
    outputs = [model.predict(x, verbose=0) for model in models]
    assert difference(*outputs) < tolerance


@pytest.mark.thin(11)
@pytest.mark.parametrize(
    ("build", "n"), [(_conv, 2), *((one, (2, 4)[k % 2]) for k, one in enumerate(BUILDS, start=1))]
)
def test_one_devices_numbers(build, n, rng):
    """In float64 nothing is left of the difference."""
    x, y = _data(build, 21, rng)
    with double_precision():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        _compare(_pair(build, n), x, y, 2e-5 if ON_JAX else 1e-10, epochs=2)


@pytest.mark.thin(4)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    ("option", "build"),
    [
        ({"run_eagerly": True}, _branches),
        ({"jit_compile": True}, _conv),
        ({"jit_compile": True}, _masked),
        ({"steps_per_execution": 2}, _masked),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@pytest.mark.slow_on_jax
def test_options_of_compile(option, build, rng):
    x, y = _data(build, 21, rng)
    _compare(_pair(build, 2, **option), x, y, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy, rng):
    """The statistics are computed in float32, over parts whose means differ."""
    x, y = _data(_conv, 19, rng)
    x += np.arange(19).reshape(-1, 1, 1, 1)
    keras.config.set_dtype_policy(policy)
    plain, parallel = _pair(_conv, 3)
    variances = []
    for model in (plain, parallel):
        model.train_on_batch(x, y)
        norms = [one for one in model.layers if isinstance(one, layers.BatchNormalization)]
        variances.append(norms[0].moving_variance.numpy())
    scale = np.abs(variances[0]).max()
    assert difference(*variances) < 0.02 * scale


def test_far_from_zero(rng):
    """Sums of squares would lose the variance."""
    x = (1000 + rng.normal(size=(20, 6))).astype("float32")
    norm = layers.BatchNormalization(momentum=0.0)
    parallel = make_parallel(keras.Sequential([keras.Input((6,)), norm]), 4)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(x, x)
    assert difference(norm.moving_mean.numpy(), x.mean(axis=0)) < 1e-3
    assert difference(norm.moving_variance.numpy(), x.astype("float64").var(axis=0)) < 1e-3


@pytest.mark.slow_on_jax
def test_the_template_is_not_changed(rng):
    x, y = _data(_conv, 8, rng)
    (_, parallel) = _pair(_conv)
    template = parallel.template
    parallel.fit(x, y, verbose=0)
    norms = [one for one in template.layers if isinstance(one, layers.BatchNormalization)]
    assert all("_moments" not in vars(norm) for norm in norms)
    assert not any(norm.synchronized for norm in norms)
    template.compile("sgd", "mse")
    assert np.isfinite(template.fit(x, y, verbose=0).history["loss"]).all()


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("options", [{}, {"shard": "weights"}, {"mode": "model"}])
def test_a_model_that_is_frozen_as_a_whole(options, rng):
    """The layers within are frozen with it: their statistics stay, and they normalize by them."""
    x, y = rng.normal(size=(24, 6, 6, 2)), rng.normal(size=(24, 2))
    plain, template = _conv(), _conv()
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, 2, **options)
    for is_trainable in (False, True, False):
        for model in (plain, parallel):
            model.trainable = is_trainable
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, y, batch_size=24, verbose=0)
        assert parallel.trainable == template.trainable == is_trainable
        assert {layer.trainable for layer in template.layers} == {is_trainable}
        assert difference(plain.get_weights(), template.get_weights()) < 1e-5
        first, second = (one.predict(x, verbose=0) for one in (plain, parallel))
        assert difference(first, second) < 1e-5
