"""What is easily computed otherwise: each family against one device, in float64."""

import dataclasses

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers, ops
from support.exactness import assert_equal, predict, train

from keras_multigpu import make_parallel
from keras_multigpu.layers import MultiHotDense

pytestmark = [pytest.mark.thin(5), pytest.mark.usefixtures("in_float64")]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(22, 6)), RNG.normal(size=(22, 2))
TOKENS = RNG.integers(1, 12, (22, 5))
TOKENS[:, 3:] *= RNG.integers(0, 2, (22, 1))
CLASSES = RNG.integers(0, 3, 22)


class Positions(layers.Layer):
    """Adds an embedding of each token's place: its indices don't come from the batch."""

    def __init__(self, repeated=False):
        super().__init__()
        self.tokens, self.places = layers.Embedding(12, 4), layers.Embedding(5, 4)
        self.repeated = repeated

    def call(self, x):
        places = ops.arange(5) // (2 if self.repeated else 1)
        return self.tokens(x) + self.places(places)


def _classifier(layer):
    inputs = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layer(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


# Gradients of rows: optimizers square the parts of a row that is named twice.
@pytest.mark.parametrize("optimizer", ["adam", "ftrl", "adafactor"])
@pytest.mark.parametrize("repeated", [False, True])
def test_embeddings_of_positions(both, optimizer, repeated):
    use = train(TOKENS, CLASSES, optimizer, "sparse_categorical_crossentropy")
    assert_equal(both(lambda: _classifier(Positions(repeated)), use))


def test_embeddings_of_positions_eagerly_after_a_call_without_a_tape(both):
    def use(model):
        optimizer = keras.optimizers.Adam(0.01)
        model(TOKENS)
        weights = model.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(tf.math.log(model(TOKENS)[:, 0]))
            optimizer.apply(tape.gradient(loss, [one.value for one in weights]), weights)
        return model.get_weights()

    assert_equal(both(lambda: _classifier(Positions()), use, "eagerly under a tape"))


# In the narrow table each slice touches every row, in an order of its own.
@pytest.mark.parametrize("width", [12, 3000])
@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_tables_of_which_a_row_touches_many_rows(both, width, sparse_gradient):
    x = RNG.integers(0, width, (22, 40))

    def build():
        inputs = keras.Input((40,), dtype="int32")
        hidden = MultiHotDense(3, width, sparse_gradient=sparse_gradient)(inputs)
        return keras.Model(inputs, layers.Dense(2)(hidden))

    assert_equal(both(build, train(x, Y, "adam", jit_compile=False)))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_sparse_matrix(both, optimizer):
    dense = RNG.normal(size=(22, 40)) * (RNG.random((22, 40)) < 0.1)

    def build():
        return keras.Sequential([keras.Input((40,), sparse=True), layers.Dense(2)])

    use = train(scipy.sparse.csr_matrix(dense), Y, optimizer)
    assert_equal(both(build, use))


class TiedPlaces(layers.Layer):
    """Takes rows of one table by tokens and by places."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(12, 4)

    def call(self, x):
        return self.table(x) + self.table(ops.arange(5))


def test_one_table_for_tokens_and_places(both):
    use = train(TOKENS, CLASSES, "adam", "sparse_categorical_crossentropy")
    assert_equal(both(lambda: _classifier(TiedPlaces()), use))


# Losses of classes look behind the probabilities.
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_saturated_softmax(both, jit_compile):
    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])

    loss = "sparse_categorical_crossentropy"
    assert_equal(both(build, train(X * 100, CLASSES, loss=loss, jit_compile=jit_compile)))


def test_a_saturated_sigmoid(both):
    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(1, activation="sigmoid")])

    assert_equal(both(build, train(X * 100, CLASSES % 2, loss="binary_crossentropy")))


class PlainSoftmax(keras.Model):
    """Ends by TensorFlow's own operation, which leaves nothing on its tensor."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return tf.nn.softmax(self.dense(x))


def test_a_saturated_softmax_of_tensorflows(both):
    use = train(X * 100, CLASSES, loss="sparse_categorical_crossentropy")
    assert_equal(both(PlainSoftmax, use))


# Losses and states: means, sums, extremes, and what is none of these.
class Add(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function, self.supports_masking = function, True

    def call(self, x, mask=None):
        weight = None if mask is None else ops.cast(mask, x.dtype)[..., None]
        self.add_loss(self.function(x, weight))
        return x


def _adding(function, initializer="glorot_uniform"):
    inputs = keras.Input((6,))
    x = Add(function)(layers.Dense(4, kernel_initializer=initializer)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: 0.1 * ops.sum(x * x),
        lambda x, mask: ops.mean(x * x, axis=0),
        lambda x, mask: ops.mean(x * x, keepdims=True),
        lambda x, mask: ops.mean(x * x, axis=1),
        lambda x, mask: ops.max(ops.abs(x)),
        lambda x, mask: 0.1 * ops.sum(ops.relu(x - 20.0)),
    ],
    ids=["sum", "means", "keepdims", "rows", "maximum", "mostly_zero"],
)
@pytest.mark.parametrize("initializer", ["glorot_uniform", "zeros"])
def test_losses_that_are_sums_means_or_extremes(both, function, initializer):
    assert_equal(both(lambda: _adding(function, initializer), train(X, Y)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: ops.sum(x * x * mask) / ops.sum(mask),
        lambda x, mask: ops.sum(ops.square(ops.mean(ops.softmax(50 * x), axis=(0, 1)))),
        lambda x, mask: ops.relu(ops.sum(x * x) - 0.01),
    ],
    ids=["masked_mean", "balance", "hinge_of_a_sum"],
)
def test_losses_of_sums_and_means(both, function):
    def build():
        inputs = keras.Input((5,), dtype="int32")
        x = Add(function)(layers.Embedding(12, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))

    assert_equal(both(build, train(TOKENS, Y)))


class State(layers.Layer):
    def __init__(self, function, first=0.0, dtype=None):
        super().__init__()
        self.function = function
        constant = keras.initializers.Constant(first)
        self.value = self.add_weight((), constant, trainable=False, dtype=dtype)

    def call(self, x, training=None):
        if training:
            self.value.assign(self.function(self.value, x))
        return x


def _count(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


STATES = {
    "mean": lambda v, x: 0.9 * v + 0.1 * ops.mean(x),
    "sum": lambda v, x: v + ops.sum(x),
    "rows": lambda v, x: v + _count(x),
    "maximum": lambda v, x: ops.maximum(v, ops.max(x)),
    "minimum": lambda v, x: ops.minimum(v, ops.min(x)),
    "steps": lambda v, x: v + 1.0,
    "maximum_from_2": lambda v, x: ops.maximum(ops.maximum(v, 2.0), ops.max(x)),
}


@pytest.mark.parametrize("name", STATES)
def test_states(both, name):
    def build():
        return keras.Sequential([keras.Input((6,)), State(STATES[name]), layers.Dense(2)])

    assert_equal(both(build, train(X, Y)))


def _unbiased(value, x):
    return 0.9 * value + 0.1 * ops.mean(ops.var(x, 0)) * _count(x) / (_count(x) - 1)


def _rounded_mean(value, x):
    return ops.cast(ops.mean(x), value.dtype)


@pytest.mark.parametrize(("function", "dtype"), [(_unbiased, None), (_rounded_mean, "int32")])
def test_states_of_means(both, function, dtype):
    def build():
        state = State(function, dtype=dtype)
        return keras.Sequential([keras.Input((6,)), state, layers.Dense(2)])

    assert_equal(both(build, train(X, Y)))


@pytest.mark.parametrize("floatx", ["float32", "bfloat16"])
def test_a_counter_does_not_drift(both, floatx):
    keras.config.set_floatx(floatx)

    def build():
        state = State(STATES["steps"], first=1e6, dtype="float32")
        return keras.Sequential([keras.Input((6,)), state, layers.Dense(2)])

    def use(model):
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=3, epochs=3, verbose=0)
        return float(model.layers[0].value)

    assert both(build, use) == (1e6 + 24, 1e6 + 24)


def test_a_state_that_is_assigned_and_read_has_no_gradient(both):
    def build():
        state = State(lambda value, x: 0.5 * value + 0.5 * ops.mean(x))
        state.call = lambda x, training=None: _assigned_and_read(state, x, training)
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), state, layers.Dense(2)])

    assert_equal(both(build, train(X[:20], Y[:20])))


def _assigned_and_read(state, x, training):
    if training:
        state.value.assign(state.function(state.value, x))
    return x - state.value


# Rows that see each other.
class Paired(keras.Model):
    def call(self, x, prior=None):
        return x + prior


def _lambda(function):
    return lambda: keras.Sequential([keras.Input((6,)), layers.Lambda(function, (6,))])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - ops.mean(x, 0),
        lambda x: ops.flip(x, 0),
        lambda x: ops.softmax(x, axis=0),
        lambda x: ops.concatenate([x, -x], axis=0),
        lambda x: x / _count(x),
        lambda x: x + 0 * ops.mean(x),
        lambda x: ops.matmul(x, ops.transpose(x)),
        lambda x: ops.mean(x),
        lambda x: x / ops.maximum(30.0, ops.sum(ops.abs(x))),
        lambda x: ops.cond(ops.max(x) > 50.0, lambda: x - ops.mean(x, axis=0), lambda: x),
        lambda x: x * ops.maximum(_count(x), 3.0),
        lambda x: ops.concatenate([1e9 * x, x - ops.mean(x, axis=0)], axis=-1),
    ],
    ids=[
        *("mean", "flip", "softmax", "views", "count", "no_effect", "pairs", "scalar"),
        *("large_sums", "large_values", "many_rows", "small_beside_large"),
    ],
)
def test_rows_that_see_each_other(both, function):
    assert_equal(both(_lambda(function), predict(X)))


def test_arguments_without_rows_of_the_batch(both):
    prior = tf.range(4, dtype="float64")
    assert_equal(both(Paired, lambda model: model(X[:4, :4], prior=prior)))
    other = tf.constant(X[:1])
    assert_equal(both(Paired, lambda model: model(X, prior=other)))


@pytest.mark.parametrize("width", [1, 6, 7])
def test_ragged_rows_padded_in_the_model(both, width):
    lengths = (1, 5, 2, 7, 3, 4, 6, 2)
    ragged = tf.RaggedTensor.from_row_lengths(RNG.normal(size=(30, 3)), lengths)
    x = [tf.constant(RNG.normal(size=(8, width))), ragged]

    def build():
        other, rows = keras.Input((width,)), keras.Input((None, 3), ragged=True)
        padded = layers.Lambda(lambda one: one.to_tensor(), output_shape=(None, 3))(rows)
        pooled = layers.GlobalAveragePooling1D()(padded)
        return keras.Model([other, rows], layers.Concatenate()([pooled, other]))

    assert_equal(both(build, lambda model: np.asarray(model(x))))


class Shuffled(layers.Layer):
    """Adds the rows to each other in an order that is drawn."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.shuffle(x, seed=self.seeds)


def test_rows_that_are_shuffled(both):
    def build():
        return keras.Sequential([keras.Input((6,)), Shuffled()])

    assert_equal(both(build, predict(X)))


def test_padding_made_in_the_model(both):
    texts = tf.constant([" ".join(["red"] * (1 + row % 7)) for row in range(12)])

    def build():
        inputs = keras.Input((), dtype="string")
        x = layers.TextVectorization(vocabulary=["red", "green"])(inputs)
        x = layers.Embedding(9, 4)(x)
        return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))

    assert_equal(both(build, predict(texts)))


# What a trace depends on.
def test_two_functions_of_a_model_that_is_not_told_of_training(both):
    class Block(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.999, seed=1)

        def call(self, x):
            return self.drop(x)

    def use(model):
        tf.function(lambda x: model(x, training=True), autograph=False)(X)
        test = tf.function(lambda x: model(x, training=False), autograph=False)
        return test(tf.constant(X)).numpy()

    assert_equal(both(Block, use))


def test_settings_changed_between_functions(both):
    def build():
        norm = layers.BatchNormalization(center=False, scale=False)
        return keras.Sequential([keras.Input((6,)), norm, layers.Dropout(0.5, seed=1)])

    def use(model):
        tf.function(lambda x: model(x, training=True), autograph=False)(tf.constant(X))
        model.layers[0].trainable, model.layers[1].rate = False, 0.0
        return tf.function(lambda x: model(x, training=True), autograph=False)(tf.constant(X))

    plain, parallel = both(build, use)
    assert np.abs(parallel.numpy() - X).max() < 0.2
    assert np.abs(plain.numpy() - X).max() < 0.2


# State and random numbers of TensorFlow's own.
class Seen(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0)

    def call(self, x):
        self.calls.assign_add(1)
        return x


def test_variables_of_tensorflows_change_once(both):
    def build():
        return keras.Sequential([keras.Input((6,)), Seen(), layers.Dense(2)])

    def use(model):
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=9, verbose=0)
        return int(model.layers[0].calls)

    assert both(build, use) == (3, 3)


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda x: tf.random.normal(tf.shape(x), dtype=x.dtype), "RandomStandardNormal"),
        (lambda x: keras.random.normal(ops.shape(x), dtype=x.dtype, seed=5), "a fixed seed"),
    ],
    ids=["tensorflow", "fixed_seed"],
)
def test_noise_that_would_be_the_same_on_all_devices(both, draw, match):
    build = _lambda(lambda x: 0 * x + draw(x))
    plain, parallel = both(build, predict(np.zeros((8, 6))))
    assert len(np.unique(parallel)) == len(np.unique(plain)) == 48


# Gradients.
class Features(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, activation="tanh"), layers.Dense(2)
        self.raw = tf.Variable(tf.ones(6, "float64"))

    def call(self, x):
        hidden = self.hidden(x * self.raw)
        return tf.stop_gradient(hidden), self.out(hidden)


@pytest.mark.parametrize("in_function", [False, True])
def test_gradients_by_what_is_watched(both, in_function):
    def use(model):
        model(X)
        model.hidden.trainable = False

        def gradients():
            with tf.GradientTape() as tape:
                tape.watch(model.hidden.kernel.value)
                total = tf.reduce_sum(model(tf.constant(X))[1])
            return tape.gradient(total, [model.hidden.kernel.value, model.raw])

        return tf.function(gradients, autograph=False)() if in_function else gradients()

    assert_equal(both(Features, use, None if in_function else "eagerly under a tape"))


def test_no_gradient_is_not_zero(both):
    def build():
        inputs = keras.Input((6,))
        hidden = layers.Dense(4, name="hidden")(inputs)
        stopped = layers.Lambda(ops.stop_gradient)(hidden)
        outputs = {"a": layers.Dense(2, name="a")(stopped), "b": layers.Dense(1, name="b")(hidden)}
        return keras.Model(inputs, outputs)

    def use(model):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, {"a": "mse", "b": "mse"})
        model.fit(X, {"a": Y, "b": Y[:, :1]}, verbose=0, shuffle=False)
        model.compile(optimizer, {"a": "mse"})
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            model.fit(X, {"a": Y}, epochs=3, verbose=0, shuffle=False)
        return model.get_weights()

    assert_equal(both(build, use))


def test_float8(both):
    def build():
        model = keras.Sequential([layers.Dense(8), layers.Dense(2)])
        model.build((None, 6))
        with pytest.warns(UserWarning, match="InputLayer does not have a `quantize`"):
            model.quantize("float8")
        return model

    assert_equal(both(build, train(X, Y)), 1e-6)


# Structures and shapes.
@dataclasses.dataclass
class Named:
    value: object
    factor: float = 2.0


class Dictionary(dict):
    pass


class Returning(keras.Model):
    def __init__(self, wrap):
        super().__init__()
        self.wrap, self.dense = wrap, layers.Dense(2)

    def call(self, x, setting=None):
        return self.wrap(self.dense(x))


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (Named, lambda made: made.value),
        (lambda y: Dictionary(y=y), lambda made: made["y"]),
        (lambda y: (y, 3), lambda made: made[0] * made[1]),
    ],
    ids=["dataclass", "dictionary", "number"],
)
@pytest.mark.parametrize("in_function", [False, True])
def test_structures_that_calls_return(both, wrap, get, in_function):
    def use(model):
        def call(x):
            return get(model(x, setting=Named(1)))

        return (tf.function(call, autograph=False) if in_function else call)(tf.constant(X))

    assert_equal(both(lambda: Returning(wrap), use))


def test_objects_in_which_tensors_cannot_be_found(both):
    class Box:
        def __init__(self, value):
            self.value = value

    def use(model):
        return tf.function(lambda x: model(x).value, autograph=False)(tf.constant(X))

    assert_equal(both(lambda: Returning(Box), use, "an object of type Box"))


def test_images_of_any_size(both):
    def build():
        x = inputs = keras.Input((None, None, 1))
        skips = []
        for _ in range(3):
            x = layers.Conv2D(2, 3, padding="same")(x)
            skips.append(x)
            x = layers.MaxPooling2D()(x)
        for skip in reversed(skips):
            x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        return keras.Model(inputs, layers.Conv2D(1, 1)(x))

    images = RNG.normal(size=(7, 16, 24, 1))
    assert_equal(both(build, train(images, images)))


def test_what_follows_a_map_over_rows_is_spread(both):
    """One device runs the loop; a warning would say so if it did the rest, too."""

    def build():
        doubled = layers.Lambda(lambda x: tf.map_fn(lambda row: row * 2, x), output_shape=(6,))
        hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
        return keras.Sequential([keras.Input((6,)), doubled, *hidden, layers.Dense(2)])

    assert_equal(both(build, train(X, Y)))


def test_numbers_of_features_that_are_those_of_rows(both):
    """Then a size does not tell which axis is the batch."""

    def build():
        return keras.Sequential([keras.Input((8, 8)), layers.LSTM(8), layers.Dense(8)])

    def use(model):
        model.compile("adam", "mse", jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), model.predict(data, verbose=0)

    x, y = RNG.normal(size=(16, 8, 8)), RNG.normal(size=(16, 8))
    assert_equal(both(build, use))


def test_a_branch_under_xla(both):
    class Gate(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6, activation="tanh")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return ops.cond(ops.sum(self.dense.bias) > -1.0, lambda: self.dense(x), lambda: x)

    def build():
        return keras.Sequential([keras.Input((6,)), Gate(), layers.Dense(2)])

    assert_equal(both(build, train(X, Y, jit_compile=True)))


def test_a_model_that_checks_its_rows():
    def check(x):
        with tf.control_dependencies([tf.debugging.assert_greater(x, tf.constant(5e3, x.dtype))]):
            return tf.identity(x)

    model = make_parallel(_lambda(check)(), 4)
    made = model.predict(np.full((9, 6), 1e4), verbose=0)
    assert np.all(made == 1e4)


@pytest.mark.parametrize("name", ["Conv2D", "DepthwiseConv2D", "Conv2DTranspose"])
def test_images_of_any_size_on_fewer_devices(name, rng):
    """oneDNN's kernels, in single precision, give no rows a wrong shape."""

    def convolution(units):
        more = {"dtype": "float32"} | ({} if name == "DepthwiseConv2D" else {"filters": units})
        return getattr(layers, name)(kernel_size=3, padding="valid", **more)

    keras.utils.set_random_seed(1)
    plain = keras.Sequential([keras.Input((None, None, 2)), convolution(4), convolution(2)])
    template = keras.models.clone_model(plain)
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, 4)
    for model in (plain, parallel):
        model.compile("sgd", "mse", jit_compile=False)
    for rows, size in ((2, 9), (1, 11), (3, 12)):
        x = rng.normal(size=(rows, size, size, 2)).astype("float32")
        y = np.ones_like(plain.predict(x, verbose=0))
        losses = [model.train_on_batch(x, y) for model in (plain, parallel)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    for one, other in zip(plain.get_weights(), template.get_weights()):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
