"""Convolutions on a mesh: XLA's gradients of rows that groups of devices have are wrong."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu import make_parallel

pytestmark = pytest.mark.filterwarnings("ignore:Large layers, which are spread")


def _model(*first):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            *first,
            layers.DepthwiseConv2D(3),
            layers.Conv2D(8, 2, groups=2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(64, "tanh"),
            layers.Dense(2),
        ]
    )


@pytest.fixture
def data(rng):
    return rng.normal(size=(16, 6, 6, 4)).astype("float32"), rng.normal(size=(16, 2)).astype(
        "float32"
    )


def _trained(model, x, y, **options):
    model.compile(keras.optimizers.SGD(1.0), "mse", **options)
    before = [np.array(one) for one in model.get_weights()]
    model.train_on_batch(x, y)
    return [np.array(one) - old for one, old in zip(model.get_weights(), before)]


def _equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 + 1e-5 * np.abs(other).max())


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_steps_that_are_not_compiled(options, data):
    parallel = make_parallel(_model(), 4, model_devices=2)
    with pytest.warns(UserWarning, match="are not compiled, and so each device computes all"):
        found = _trained(parallel, *data, **options)
    _equal(found, _trained(_model(), *data))
    parallel.compile("sgd", "mse")
    parallel.fit(*data, verbose=0)
    assert any(not one.value.is_fully_replicated for one in parallel.trainable_variables)


def test_a_layer_that_keras_does_not_compile(data):
    parallel = make_parallel(_model(layers.RandomRotation(0.1, seed=1)), 4, model_devices=2)
    with pytest.warns(UserWarning, match=r"Keras compiles none with random_rotation.*\)"):
        found = _trained(parallel, *data)
    _equal(found, _trained(_model(layers.RandomRotation(0.1, seed=1)), *data))


def _gradients(model):
    values = [one.value for one in model.trainable_variables]
    others = [one.value for one in model.non_trainable_variables]

    def step(values, x, y):
        def loss(values):
            outputs, _ = model.stateless_call(values, others, x, training=True)
            return jnp.mean((outputs - y) ** 2)

        return jax.grad(loss)(values)

    return step, values


@pytest.mark.parametrize("kind", [{"model_devices": 2}, {"mode": "model"}], ids=str)
def test_a_users_own_step(kind, data):
    step, values = _gradients(_model())
    expected = jax.jit(step)(values, *data)
    parallel = make_parallel(_model(), 4, **kind)
    step, values = _gradients(parallel)
    _equal(parallel.function(step, rows=("x", "y"))(values, *data), expected)


def test_a_function_that_the_user_compiles(data):
    step, values = _gradients(_model())
    expected = jax.jit(step)(values, *data)
    step, values = _gradients(make_parallel(_model(), 4, model_devices=2))
    with pytest.warns(UserWarning, match=r"each group of its devices computes all rows\. .*let"):
        _equal(jax.jit(step)(values, *data), expected)


def test_a_layer_of_a_plain_model(data):
    """It has no step of the user's: the cure is the whole made parallel."""
    x, y = data
    parallel = make_parallel(_model(), 4, model_devices=2)

    def around(inner):
        model = keras.Sequential([keras.Input(x.shape[1:]), inner, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.warns(UserWarning, match=r"build that with `\.template`, and make the whole para"):
        around(parallel).fit(x, y, verbose=0)
    make_parallel(around(parallel.template), 4, model_devices=2).fit(x, y, verbose=0)


def _between_large_layers(options):
    keras.utils.set_random_seed(3)
    outer = [layers.Dense(8, "tanh"), layers.Conv1D(8, 3, **options), layers.Dense(6, "tanh")]
    return keras.Sequential([keras.Input((8, 4)), *outer, layers.Flatten(), layers.Dense(1)])


_CONVOLUTIONS = [{"padding": "same"}, {"dilation_rate": 2}, {"groups": 2}]


@pytest.mark.filterwarnings("ignore:.*is trained on one device")
@pytest.mark.filterwarnings("ignore:.*each group of its devices computes all rows")
@pytest.mark.parametrize("options", _CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_template_alone(options, is_trained, rng):
    """Also convolutions that are not grouped: the weights beside them are in parts."""
    x, y = (rng.normal(size=size).astype("float32") for size in ((8, 8, 4), (8, 1)))
    plain = _between_large_layers(options)
    template = _between_large_layers(options)
    parallel = make_parallel(template, 4, model_devices=2)
    for model in (plain, parallel) if is_trained else ():
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, epochs=2, verbose=0)
        model.train_on_batch(x, y)
    step, values = _gradients(plain)
    expected = jax.jit(step)(values, x, y)
    for model in (template, parallel):
        step, values = _gradients(model)
        _equal(jax.jit(step)(values, x, y), expected)
    _equal(_trained(template, x, y), _trained(plain, x, y))
