"""Keras's steps on several devices: the numbers of one device, in float64."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.parity import difference, variables

from keras_multigpu import make_parallel

ROWS = (9, 2, 13, 1)  # of the batches: smaller than the number of devices, too


def _classes(rng, rows):
    return np.eye(4)[rng.integers(0, 4, rows)]


def _flat(rng, rows):
    return rng.normal(size=(rows, 6)), _classes(rng, rows)


def _images(rng, rows):
    return rng.normal(size=(rows, 8, 8, 3)), _classes(rng, rows)


def _texts(rng, rows):
    return rng.integers(0, 9, (rows, 5)), _classes(rng, rows)


def _series(rng, rows):
    return rng.normal(size=(rows, 5, 4)), _classes(rng, rows)


def _weighted(rng, rows):
    return (*_flat(rng, rows), rng.uniform(size=rows))


def _dense(*inner):
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(4, "softmax")])


def _large_conv():
    """A kernel whose gradient is summed in pieces, and whose shape no device knows."""
    kernel = layers.Conv2D(64, 3, strides=2)
    hidden = [layers.Conv2D(16, 3), kernel, layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((8, 8, 3)), *hidden, layers.Dense(4, "softmax")])


def _dilated():
    inputs = x = keras.Input((16, 3))
    for number in range(2):
        dilation = {"padding": "causal", "dilation_rate": 2 ** (number + 1)}
        x = layers.Conv1D(4, 3, activation="relu", **dilation)(x)
        x = layers.BatchNormalization()(layers.SpatialDropout1D(0.2, seed=number)(x))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _signals(rng, rows):
    return rng.normal(size=(rows, 16, 3)), rng.normal(size=(rows, 2))


def _conv():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3),
            layers.Conv2D(4, 1, groups=2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, "softmax"),
        ]
    )


def _transformer():
    words = keras.Input((5,), dtype="int32")
    known = layers.Embedding(9, 8, mask_zero=True)(words)
    seen = layers.MultiHeadAttention(2, 4, dropout=0.1)(known, known)
    summed = layers.LayerNormalization()(known + seen)
    return keras.Model(words, layers.Dense(4, "softmax")(layers.GlobalAveragePooling1D()(summed)))


def _recurrent():
    return keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GRU(5, recurrent_dropout=0.2),
            layers.Dense(4, "softmax"),
        ]
    )


class _Penalties(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class _LaterMixed(layers.Layer):
    """Rows that see each other only after some steps, by a random order."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=None):
        if training:
            self.steps.assign_add(1)
        return keras.ops.where(
            self.steps > 2, 0.5 * x + 0.5 * keras.random.shuffle(x, seed=self.seeds), x
        )


class _Contrastive(keras.losses.Loss):
    def call(self, y_true, y_pred):
        scores = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        places = keras.ops.arange(keras.ops.shape(y_pred)[0])
        found = keras.losses.sparse_categorical_crossentropy(places, scores, from_logits=True)
        return found + keras.losses.categorical_crossentropy(y_true, y_pred)


class Private(keras.Model):
    """Gradients of each row, clipped before they are summed."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            losses = keras.losses.categorical_crossentropy(y, self(x, training=True))
        rows = tape.jacobian(losses, self.trainable_variables)
        norms = tf.sqrt(sum(tf.reduce_sum(g**2, range(1, len(g.shape))) for g in rows))
        scale = tf.minimum(tf.ones([], norms.dtype), 0.1 / norms)
        count = tf.cast(tf.shape(x)[0], scale.dtype)
        gradients = [tf.tensordot(scale, g, 1) / count for g in rows]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": tf.reduce_mean(losses), "norm": tf.reduce_mean(norms)}


class TwoGradients(keras.Model):
    """A penalty of the gradient by the inputs, in a step with its own parts."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = tf.reduce_sum(self.layers[1](x)[:, 0])
            slope = inner.gradient(scores, x)
            loss = tf.reduce_mean(keras.losses.categorical_crossentropy(y, self(x)))
            loss += tf.cast(tf.reduce_mean(tf.reduce_sum(slope**2, 1)), loss.dtype)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def _subclassed(kind):
    given = keras.Input((6,))
    hidden = layers.Dense(5, "tanh")(given)
    return kind(given, layers.Dense(4, "softmax")(hidden))


CASES = {
    "adam": (lambda: _dense(layers.Dense(8, "relu")), _flat, {"metrics": ["accuracy", "auc"]}),
    "dropout": (lambda: _dense(layers.Dropout(0.4), layers.GaussianNoise(0.1)), _flat, {}),
    "batch_norm": (lambda: _dense(layers.BatchNormalization()), _flat, {}),
    "convolutions": (_conv, _images, {}),
    "large_convolutions": (_large_conv, _images, {}),
    "transformer": (_transformer, _texts, {}),
    "dilated": (_dilated, _signals, {}),
    "recurrent": (_recurrent, _series, {}),
    "sample_weights": (lambda: _dense(layers.Dense(3)), _weighted, {"weighted_metrics": ["mae"]}),
    "add_loss": (lambda: _dense(layers.Dense(4, kernel_regularizer="l2"), _Penalties()), _flat, {}),
    "mixed_rows": (lambda: _dense(_LaterMixed()), _flat, {}),
    "contrastive": (lambda: _dense(layers.Dense(4)), _flat, {"loss": _Contrastive}),
    "private": (lambda: _subclassed(Private), _flat, {}),
    "two_gradients": (lambda: _subclassed(TwoGradients), _flat, {}),
    "clipped": (
        lambda: _dense(layers.Dense(8)),
        _flat,
        {"optimizer": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True)},
    ),
    "accumulated": (
        lambda: _dense(layers.Dense(8)),
        _flat,
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
    ),
}


def _compiled(model, optimizer=lambda: keras.optimizers.Adam(0.01), loss=None, **settings):
    loss = "categorical_crossentropy" if loss is None else loss()
    model.compile(optimizer(), loss, **settings)
    return model


def _trained(build, batches, settings, devices):
    keras.utils.set_random_seed(5)
    model = build()
    model = model if devices == 1 else make_parallel(model, devices)
    _compiled(model, **settings)
    logs = []
    for _ in range(2):
        for batch in batches:
            x, y, *weight = batch
            logs.append(model.train_on_batch(x, y, *weight, return_dict=True))
    x, y, *weight = batches[0]
    more = {"sample_weight": weight[0]} if weight else {}
    results = model.evaluate(x, y, verbose=0, return_dict=True, **more)
    return model, logs, results, model.predict(batches[2][0], verbose=0)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_device(name, rng):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    build, make, settings = CASES[name]
    batches = [make(rng, rows) for rows in ROWS]
    plain, *expected, outputs = _trained(build, batches, settings, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rows that are mixed
        parallel, *found, theirs = _trained(build, batches, settings, 3)
    assert difference(expected, found) < 1e-11
    assert difference(outputs, theirs) < 1e-6  # Keras's predictions are float32
    assert difference(variables(plain), variables(parallel)) < 1e-11


@pytest.mark.parametrize("name", [name for name in CASES if name != "mixed_rows"])
def test_nothing_is_left_to_one_device(name, rng):
    build, make, settings = CASES[name]
    model = make_parallel(build(), 3)
    _compiled(model, **settings)
    model.train_on_batch(*make(rng, 8))  # a warning would be an error
    share = model.explain().partition(" of the work on rows")[0].rpartition(" ")[2]
    assert float(share.rstrip("%")) > 95


class _NoiseInABranch(layers.Layer):
    def call(self, x):
        def noisy():
            return x * tf.random.stateless_uniform(tf.shape(x), [1, 7], dtype=x.dtype)

        return tf.cond(tf.reduce_mean(x) > -9.0, noisy, lambda: x)


def _categories(x):
    drawn = tf.random.stateless_categorical(tf.math.log_softmax(x), 2, [3, 5])
    return x + tf.cast(drawn[:, :1], x.dtype)


DRAWN = {
    "branch": lambda: _dense(layers.Dense(6, "tanh"), _NoiseInABranch()),
    "categorical": lambda: _dense(layers.Dense(6), layers.Lambda(_categories)),
    "loop": lambda: _dense(layers.Reshape((3, 2)), layers.LSTM(4, recurrent_dropout=0.3)),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_of_xla(name, rng):
    """XLA draws other numbers than TensorFlow: of all that it compiles on one device."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    batches, settings = [_flat(rng, rows) for rows in ROWS], {"jit_compile": True}
    plain, *expected, outputs = _trained(DRAWN[name], batches, settings, 1)
    parallel, *found, theirs = _trained(DRAWN[name], batches, settings, 2)
    assert difference(expected, found) < 1e-11
    assert difference(outputs, theirs) < 1e-6
    assert difference(variables(plain), variables(parallel)) < 1e-11


@pytest.mark.parametrize("jit_compile", [False, True])
def test_reflected_pads_on_a_device_without_rows(jit_compile, rng):
    def build():
        layer = layers.Lambda(lambda x: ops.pad(x, ((0, 0), (2, 1)), mode="reflect"))
        return _dense(layers.Dense(5, "tanh"), layer)

    batches, settings = [_flat(rng, 2)] * 3, {"jit_compile": jit_compile}
    _, *expected, outputs = _trained(build, batches, settings, 1)
    _, *found, theirs = _trained(build, batches, settings, 3)
    assert difference(expected, found) < 1e-6
    assert difference(outputs, theirs) < 1e-6


class _Chosen(layers.Layer):
    """One of two functions, by a weight: the gradient takes what the other has not made."""

    def build(self, shape):
        self.is_first = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs):
        return ops.cond(self.is_first > 0, lambda: 2 * inputs, lambda: ops.tanh(inputs))


def test_branches_that_xla_compiles_for_any_number_of_rows(rng):
    def build():
        return _dense(layers.Dense(8), _Chosen())

    batches, settings = [_flat(rng, rows) for rows in (9, 2, 1)], {"jit_compile": True}
    _, *expected, outputs = _trained(build, batches, settings, 1)
    _, *found, theirs = _trained(build, batches, settings, 3)
    assert difference(expected, found) < 1e-5
    assert difference(outputs, theirs) < 1e-5


def test_a_loss_scale_that_overflows(rng):
    """Sums of slices must overflow where the whole sum does."""
    x, y = rng.normal(size=(24, 6)).astype("float32"), 30 * rng.normal(size=(24, 2))
    scales = []
    for devices in (1, 3):
        keras.utils.set_random_seed(5)
        keras.config.set_dtype_policy("mixed_float16")
        head = layers.Dense(2, dtype="float32")
        model = keras.Sequential([keras.Input((6,)), layers.Dense(32, "relu"), head])
        model = model if devices == 1 else make_parallel(model, devices)
        inner = keras.optimizers.SGD(1e-3)
        settings = {"initial_scale": 2.0**15, "dynamic_growth_steps": 4}
        model.compile(keras.optimizers.LossScaleOptimizer(inner, **settings), "mse")
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False)
        scales.append(float(model.optimizer.dynamic_scale.numpy()))
    assert scales[0] == scales[1] < 2.0**15


def test_slots_exist_before_the_step_is_traced(rng):
    traces = []

    class Counted(keras.Model):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    model = make_parallel(_subclassed(Counted), 3)
    _compiled(model)
    model.train_on_batch(*_flat(rng, 9))
    model.train_on_batch(*_flat(rng, 9))
    assert len(traces) == 1


def test_a_step_that_makes_variables_is_traced_again_with_them(rng):
    """As `tf.function` does: the first trace may have asked whether they exist."""

    class Counts(keras.Model):
        def train_step(self, data):
            factor = 0.0 if getattr(self, "seen", None) is None else 1.0
            if getattr(self, "seen", None) is None:
                self.seen = tf.Variable(2.0)
            self.seen.assign_add(factor)
            return {**super().train_step(data), "seen": self.seen.read_value()}

    model = make_parallel(_subclassed(Counts), 3)
    _compiled(model)
    logs = [model.train_on_batch(*_flat(rng, 9), return_dict=True) for _ in range(2)]
    assert [log["seen"] for log in logs] == [3.0, 4.0]


def test_what_one_device_computes_is_told(rng):
    for times, told in ((20_000, True), (2, False)):  # of little work nothing is said

        def lowest(x, times=times):
            return keras.ops.sort(keras.ops.repeat(x, times, 1), 0)[:, ::times]

        model = make_parallel(_dense(layers.Lambda(lowest)), 3)
        _compiled(model)
        warns = pytest.warns(UserWarning, match="of a train step of .* runs on one device.*'lambda")
        with warns if told else contextlib.nullcontext():
            model.train_on_batch(*_flat(rng, 9))
        assert "lambda" in model.explain()


def test_eager_steps_run_on_one_device(rng):
    model = make_parallel(_dense(layers.Dense(3)), 3)
    _compiled(model, run_eagerly=True)
    with pytest.warns(UserWarning, match="runs eagerly, and so on 'cpu:0' alone.*eagerly=False"):
        model.train_on_batch(*_flat(rng, 9))


@pytest.mark.parametrize("options", [{}, {"shard": "weights"}, {"mode": "tower"}], ids=str)
def test_functions_that_all_run_eagerly_run_on_one_device(options, rng):
    """Of `tf.config.run_functions_eagerly`, as people do who look for a fault."""
    model = make_parallel(_dense(layers.Dense(3)), 3, **options)
    step = model.function(lambda x: ops.sum(model.template(x)))
    x = _flat(rng, 9)[0]
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.warns(UserWarning, match=r"'cpu:0' alone.*Call `tf.config.run_functions_eag"):
            found = step(x)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(found, ops.sum(model.template(x)))


@pytest.mark.parametrize("options", [{}, {"model_devices": 2}], ids=str)
def test_xla_compiles_the_step_of_one_row(options):
    """It draws other random numbers than TensorFlow."""
    x, found = np.ones((3, 6)), []
    for is_parallel in (False, True):
        model = _dense(layers.Dense(8), layers.Dropout(0.5, seed=1))
        model.set_weights([np.ones(one.shape) for one in model.weights])
        if is_parallel:
            model = make_parallel(model, 4, **options)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Batches of 1 row")
            model.fit(x, np.eye(4)[:3], batch_size=1, verbose=0, shuffle=False)
        found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_xla_compiles_a_function_that_takes_no_rows():
    model, found = _dense(layers.Dense(3)), []

    def step():
        return keras.random.normal((5, 6), seed=seed)

    for make in (tf.function, make_parallel(model, 3).function):
        seed = keras.random.SeedGenerator(4)
        found.append(make(step, jit_compile=True)())
    np.testing.assert_array_equal(*found)


class _Gan(keras.Model):
    """Draws its noise by a seed's state: as many rows as the batch has."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = keras.Sequential([layers.Dense(6)]), _dense(layers.Dense(9))
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return self.critic(inputs)

    def loss_of(self, rows):
        made = self.maker(keras.random.normal((tf.shape(rows)[0], 6), seed=self.seeds))
        return ops.mean(self.critic(made) ** 2) - ops.mean(self.critic(rows) ** 2)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data[0])
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_what_is_made_of_noise_is_spread(rng, in_float64):
    """Also if the noise depends on variables alone, as weights do."""
    losses = []
    for devices in (1, 3):
        keras.utils.set_random_seed(5)
        model = _Gan()
        model.maker.build((None, 6))
        model(np.ones((2, 6)))
        parallel = model if devices == 1 else make_parallel(model, devices)
        parallel.compile("adam", jit_compile=False)
        x = np.random.default_rng(3).normal(size=(25, 6))
        history = parallel.fit(x, x, batch_size=10, epochs=2, shuffle=False, verbose=0)
        step = parallel.function(model.loss_of) if devices > 1 else model.loss_of
        losses.append(
            [*history.history["loss"], *(float(step(tf.constant(x[:n]))) for n in (9, 7, 5))]
        )
    np.testing.assert_allclose(*losses, rtol=1e-12)
    assert parallel.explain().count("100.0% of the work on rows is spread over the devices.") == 2


def test_what_follows_numbers_drawn_by_weights_is_spread(rng, in_float64):
    """For any number of rows."""
    table, seeds = layers.Embedding(4, 6), keras.random.SeedGenerator(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    table.build((None,))

    def step(x):
        chosen = keras.random.categorical(model(x), 2, seed=seeds)
        return ops.sum(model(table(chosen[:, 1])))

    parallel = make_parallel(model, 3)
    spread, found = parallel.function(step), []
    for rows in (9, 7, 5):
        x = tf.constant(rng.normal(size=(rows, 6)))
        state = seeds.state.numpy()
        expected = float(step(x))
        seeds.state.assign(state)
        found.append(float(spread(x)) / expected)
    np.testing.assert_allclose(found, 1, rtol=1e-12)
    assert "MatMul" not in parallel.explain()  # of the table's rows
