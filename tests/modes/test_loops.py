"""Published training loops, which call parts of the model: the numbers of one device."""

import keras
import pytest
from support.loops import LOOPS, PixToPix, Siamese, VariationalAutoencoder, WassersteinGan
from support.parity import difference
from support.precision import double_precision

from keras_multigpu import make_parallel

IS_JAX = keras.backend.backend() == "jax"
ROWS = 16 if IS_JAX else 13  # TensorFlow: the last batch has 5 rows, on two devices
TOLERANCE = 1e-5 if IS_JAX else 1e-12  # on JAX Keras computes parts in float32

every_loop = pytest.mark.parametrize("loop", LOOPS, ids=lambda one: one.__name__)


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with double_precision():
        yield


def _build(loop, n, **options):
    keras.utils.set_random_seed(3)
    model = loop()
    # With the default epsilon, Adam makes steps of gradients that are zero but for rounding.
    model.compile(lambda: keras.optimizers.Adam(0.02, epsilon=1e-3), **options)
    return make_parallel(model, n) if n else model  # compiled like the template


def _pair(loop, rng, **options):
    """A plain and a parallel model after two steps, their histories, and the data."""
    x, models, histories = loop.data(rng, ROWS), [], []
    for n in (None, 2):
        models.append(_build(loop, n, **options))
        fitted = models[-1].fit(x, batch_size=8, shuffle=False, verbose=0)
        histories.append(fitted.history)
    return models, histories, x


@every_loop
@pytest.mark.thin(7)
def test_the_weights_and_logs_of_one_device(loop, rng):
    (plain, parallel), histories, _ = _pair(loop, rng)
    assert difference(*histories) < TOLERANCE
    assert difference(plain.get_weights(), parallel.get_weights()) < TOLERANCE
    start = _build(loop, None).get_weights()
    assert difference(start, plain.get_weights()) > 1e-3


def test_evaluation(rng):
    (plain, parallel), _, x = _pair(VariationalAutoencoder, rng)
    logs = [m.evaluate(x, batch_size=8, verbose=0, return_dict=True) for m in (plain, parallel)]
    assert difference(*logs) < TOLERANCE


def _distiller():
    distillation = keras.distillation
    teacher, student = (
        keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, activation="tanh", name="hidden"),
                keras.layers.Dense(3),
            ]
        )
        for _ in range(2)
    )
    losses = [
        distillation.LogitsDistillation(temperature=2.0),
        distillation.FeatureDistillation("mse", "hidden", "hidden"),
    ]
    return distillation.Distiller(teacher, student, losses)


@pytest.mark.skipif(not hasattr(keras, "distillation"), reason="since Keras 3.12")
def test_the_distiller_of_keras(rng):
    """Its own `compile` and `compute_loss`, and parts that share layers."""
    x, y = rng.normal(size=(ROWS, 6)), rng.integers(0, 3, ROWS)
    results = []
    for n in (None, 2):
        keras.utils.set_random_seed(3)
        model = _distiller()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
        model = make_parallel(model, n) if n else model
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        results.append([history, model.get_weights()])
    assert difference(*results) < TOLERANCE


WAYS = [({"run_eagerly": True}, WassersteinGan), ({"run_eagerly": True}, VariationalAutoencoder)]
# Without random numbers: compiled by XLA, plain Keras's step on TensorFlow draws other ones.
WAYS += [({"jit_compile": True}, PixToPix), ({"jit_compile": True}, Siamese)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(("option", "loop"), WAYS)
def test_ways_of_running(loop, option, rng):
    (plain, parallel), histories, _ = _pair(loop, rng, **option)
    assert difference(*histories) < TOLERANCE
    assert difference(plain.get_weights(), parallel.get_weights()) < TOLERANCE
