"""MultiHotDense beside Dense on the multi-hot row: outputs, gradients, training, devices."""

import keras
import numpy as np
import pytest
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.layers import MultiHotDense

WIDTH, ONES = 40, 6
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not ON_TENSORFLOW, reason="only TensorFlow has these")


def rows_of(rng, rows):
    """Indices, some of them twice in a row, many in several rows; and the multi-hot rows."""
    indices = rng.integers(0, WIDTH // 2, size=(rows, ONES)).astype("int32")
    return indices, multi_hot(indices)


def multi_hot(indices, weights=None, kept=None):
    dense = np.zeros((len(indices), WIDTH), "float32")
    for row, ones in enumerate(indices):
        for place, index in enumerate(ones):
            if kept is None or kept[row, place]:
                dense[row, index] += 1 if weights is None else weights[row, place]
    return dense


def pair(units=3, **options):
    """The layer, and Dense with the same weights."""
    sparse, own = MultiHotDense(units, WIDTH, **options), dict(options)
    for name in ("padding", "sparse_gradient"):
        own.pop(name, None)
    dense = keras.layers.Dense(units, **own)
    sparse.build((None, ONES))
    dense.build((None, WIDTH))
    draw = np.random.default_rng(3)
    weights = [draw.normal(size=w.shape) for w in dense.get_weights()]
    assert [w.shape for w in weights] == [w.shape for w in sparse.get_weights()]
    dense.set_weights(weights)
    sparse.set_weights(weights)
    return sparse, dense


def array(tensor):
    return keras.ops.convert_to_numpy(tensor)


def gradients(layer, *inputs, upstream):
    """Those of `sum(upstream * layer(inputs))` by the layer's weights and the last input."""
    if ON_TENSORFLOW:
        import tensorflow as tf

        inputs = [tf.convert_to_tensor(one) for one in inputs]
        with tf.GradientTape() as tape:
            tape.watch(inputs[-1])
            loss = tf.reduce_sum(upstream * layer(*inputs))
        sources = [*(w.value for w in layer.trainable_weights), inputs[-1]]
        found = tape.gradient(loss, sources)
        return [None if one is None else array(tf.convert_to_tensor(one)) for one in found]
    import jax

    def loss(weights, last):
        values = zip(layer.trainable_weights, weights)
        with keras.StatelessScope(state_mapping=list(values)):
            return (upstream * layer(*inputs[:-1], last)).sum()

    weights = [w.value for w in layer.trainable_weights]
    last = jax.numpy.asarray(inputs[-1])
    if jax.numpy.issubdtype(last.dtype, jax.numpy.floating):
        by_weights, by_last = jax.grad(loss, argnums=(0, 1))(weights, last)
        return [*map(array, by_weights), array(by_last)]
    return [*map(array, jax.grad(loss)(weights, last)), None]


@pytest.mark.parametrize("sparse_gradient", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_outputs_and_gradients(rng, rows, sparse_gradient):
    indices, dense_rows = rows_of(rng, rows)
    sparse, dense = pair(activation="tanh", sparse_gradient=sparse_gradient)
    assert difference(array(sparse(indices)), array(dense(dense_rows))) < 1e-5
    upstream = rng.normal(size=(rows, 3)).astype("float32")
    ours = gradients(sparse, indices, upstream=upstream)
    theirs = gradients(dense, dense_rows, upstream=upstream)
    assert difference(ours[:2], theirs[:2]) < 1e-5
    if rows:
        assert np.abs(ours[0]).max() > 0.01


@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_weights_of_indices_have_a_gradient(rng, sparse_gradient):
    indices, _ = rows_of(rng, 5)
    weights = rng.normal(size=indices.shape).astype("float32")
    sparse, dense = pair(sparse_gradient=sparse_gradient)
    rows = multi_hot(indices, weights)
    assert difference(array(sparse(indices, weights)), array(dense(rows))) < 1e-5
    upstream = rng.normal(size=(5, 3)).astype("float32")
    ours = gradients(sparse, indices, weights, upstream=upstream)
    theirs = gradients(dense, rows, upstream=upstream)
    assert difference(ours[:2], theirs[:2]) < 1e-5
    assert difference(ours[2], np.take_along_axis(theirs[2], indices, axis=1)) < 1e-5


def test_padding_and_masks(rng):
    indices, _ = rows_of(rng, 5)
    kept = rng.random(indices.shape) < 0.5
    weights = rng.normal(size=indices.shape).astype("float32")
    sparse, dense = pair(padding=-1)
    padded = np.where(kept, indices, -1)
    expected = array(dense(multi_hot(indices, kept=kept)))
    assert difference(array(sparse(padded)), expected) < 1e-5
    assert difference(array(sparse(indices, mask=kept)), expected) < 1e-5
    half = np.arange(ONES) < 3
    both = sparse(padded, mask=np.broadcast_to(half, kept.shape))
    assert difference(array(both), array(dense(multi_hot(indices, kept=kept & half)))) < 1e-5
    expected = array(dense(multi_hot(indices, weights, kept)))
    weights = np.where(kept, weights, np.nan)  # what stands beside padding is of no account
    assert difference(array(sparse(padded, weights)), expected) < 1e-5


def test_a_keras_mask_ends_here():
    tokens = keras.Input((ONES,), dtype="int32")
    masked = keras.layers.Lambda(lambda x: x, mask=lambda x, mask=None: x > 3)(tokens)
    out = MultiHotDense(2, WIDTH, name="wide")(masked)
    assert getattr(out, "_keras_mask", None) is None
    model = keras.Model(tokens, out)
    kernel, bias = model.get_layer("wide").get_weights()
    found = model.predict(np.array([[1, 2, 3, 4, 5, 5]]), verbose=0)
    assert difference(found, (kernel[4] + 2 * kernel[5] + bias)[None]) < 1e-5


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
def test_precision(rng, policy):
    indices, dense_rows = rows_of(rng, 5)
    sparse, dense = pair(dtype=policy)
    out = sparse(indices)
    assert keras.backend.standardize_dtype(out.dtype) == keras.DTypePolicy(policy).compute_dtype
    exact = dense_rows @ dense.get_weights()[0] + dense.get_weights()[1]
    limit = 0.1 if "bfloat16" in policy else 0.02
    assert difference(array(keras.ops.cast(out, "float32")), exact) < limit


OPTIMIZERS = {
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.2, l1_regularization_strength=0.01, l2_regularization_strength=0.01
    ),
    "adam": lambda: keras.optimizers.Adam(0.002),
    "sgd": lambda: keras.optimizers.SGD(0.05),
}


def pairs_of_cases(devices, quick):
    """All pairs of an optimizer and a number of devices; those that are not quick are slow."""
    pairs = [(optimizer, number) for optimizer in OPTIMIZERS for number in devices]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


def train(inputs, first, optimizer, y, devices=None, jit=None, hidden=True):
    keras.utils.set_random_seed(1)
    x = keras.Input(inputs.shape[1:], dtype=inputs.dtype.name)
    layer = first(4 if hidden else 1)
    out = layer(x)
    model = keras.Model(x, keras.layers.Dense(1, name="out")(out) if hidden else out)
    if devices:
        model = make_parallel(model, devices)
    jit = {} if jit is None else {"jit_compile": jit}
    model.compile(OPTIMIZERS[optimizer](), "mse", **jit)
    history = model.fit(inputs, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], variables(model)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(11)
    indices, dense = rows_of(rng, 70)  # the last batch is incomplete
    return indices, dense, (dense @ rng.normal(size=(WIDTH, 1))).astype("float32")


@pytest.fixture(scope="module")
def reference(problem):
    """What plain Keras makes of the dense rows on one device, by optimizer."""
    _, dense, y = problem
    made = {}

    def of(optimizer, hidden=True):
        key = (optimizer, hidden)
        if key not in made:
            made[key] = train(dense, keras.layers.Dense, optimizer, y, hidden=hidden)
        return made[key]

    return of


@pytest.mark.parametrize(
    ("optimizer", "devices"), pairs_of_cases([None, 1, 2, 4], quick=[("adam", 4)])
)
def test_training_equals_that_of_the_dense_form(problem, reference, optimizer, devices):
    indices, _, y = problem
    ours = train(indices, lambda units: MultiHotDense(units, WIDTH), optimizer, y, devices)
    assert difference(list(ours), list(reference(optimizer))) < 2e-5


@tensorflow_only
@pytest.mark.parametrize(("optimizer", "devices"), pairs_of_cases([None, 2], quick=[("adam", 2)]))
def test_training_by_sparse_gradients(problem, reference, optimizer, devices):
    indices, _, y = problem

    def layer(units):
        return MultiHotDense(units, WIDTH, sparse_gradient=True)

    ours = train(indices, layer, optimizer, y, devices)
    assert difference(list(ours), list(reference(optimizer))) < 2e-5


@pytest.mark.parametrize("devices", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_compiled_and_linear(problem, reference, devices):
    indices, _, y = problem
    first = lambda units: MultiHotDense(units, WIDTH)  # noqa: E731
    ours = train(indices, first, "ftrl", y, devices, jit=True, hidden=False)
    assert difference(list(ours), list(reference("ftrl", hidden=False))) < 2e-5


@tensorflow_only
@pytest.mark.parametrize("weighted", [False, True])
def test_the_sparse_gradient_names_each_touched_row_once(rng, weighted):
    import tensorflow as tf

    indices, _ = rows_of(rng, 7)
    more = [tf.ones(indices.shape)] if weighted else []
    layer, _ = pair(sparse_gradient=True)
    assert not layer.supports_jit
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(indices, *more) ** 2)
    gradient = tape.gradient(loss, layer.kernel.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy().tolist()) == np.unique(indices).tolist()


def test_files_and_configuration(rng, tmp_path):
    layer = MultiHotDense(
        3,
        WIDTH,
        "relu",
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_constraint="non_neg",
        padding=-1,
        sparse_gradient=True,
    )
    config = layer.get_config()
    again = MultiHotDense.from_config(config)
    assert again.get_config() == config
    x = keras.Input((ONES,), dtype="int32")
    model = keras.Model(x, layer(x))
    assert model.output_shape == (None, 3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    indices, _ = rows_of(rng, 5)
    assert difference(loaded.predict(indices, verbose=0), model.predict(indices, verbose=0)) == 0
    assert difference(np.array(loaded.losses[0]), np.array(model.losses[0])) == 0
    bare = MultiHotDense(3, WIDTH, use_bias=False)
    bare.build((None, ONES))
    assert [w.shape for w in bare.get_weights()] == [(WIDTH, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "`units` must be a positive integer. Received: units=0"),
        ({"units": True}, "units=True"),
        ({"width": 2.5}, "`width` must be a positive integer. Received: width=2.5"),
        ({"padding": "x"}, "`padding` must be an integer.*padding='x'"),
        ({"padding": True}, "padding=True"),
        ({"sparse_gradient": 1}, "`sparse_gradient` must be True or False.*sparse_gradient=1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHotDense(**{"units": 1, "width": 5, **arguments})


def test_bad_inputs():
    layer = MultiHotDense(1, 5)
    with pytest.raises(ValueError, match=r"integers of shape .*shape \(2, 3\) and dtype float32"):
        layer(np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match=r"shape \(2,\) and dtype int32.*encoder.ones"):
        layer(np.ones(2, "int32"))
    with pytest.raises(ValueError, match=r"weights of shape \(2,\), and indices of shape \(2, 3"):
        layer(np.ones((2, 3), "int32"), np.ones(2, "float32"))


class OwnGradient(keras.Model):
    """Its output is a gradient by the kernel of a `MultiHotDense`."""

    def __init__(self):
        super().__init__()
        self.wide = MultiHotDense(3, 20)

    def build(self, input_shape):
        self.wide.build((None, 4))

    def call(self, indices):
        import tensorflow as tf

        kernel = self.wide.kernel.value
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = self.wide(indices) ** 3
        rows = tf.reduce_sum(tape.gradient(outputs, kernel))
        return self.wide(indices) * rows


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tapes are TensorFlow's")
@pytest.mark.parametrize("device", [pytest.param("cpu:0", marks=pytest.mark.slow), "cpu:1"])
def test_a_tape_within_the_template(device, rng):
    x, y = rng.integers(20, size=(8, 4)).astype("int32"), rng.normal(size=(8, 3))
    plain, template = OwnGradient(), OwnGradient()
    plain(x), template(x)
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, devices=[device])
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.001), "mse")
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-5


@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("int16", "uint32")), "uint8"],
)
def test_indices_of_other_types(dtype, rng):
    x, y = rng.integers(20, size=(7, 4)), rng.normal(size=(7, 3))

    def build(dtype):
        keras.utils.set_random_seed(2)
        inputs = keras.Input((4,), dtype=dtype)
        return keras.Model(inputs, MultiHotDense(3, 20)(inputs))

    plain, parallel = build("int32"), make_parallel(build(dtype), 2)
    for model, values in ((plain, x.astype("int32")), (parallel, x.astype(dtype))):
        model.compile("sgd", "mse")
        model.fit(values, y, batch_size=4, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-5
