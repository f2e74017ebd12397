"""Tables whose rows are spread: indices and sums cross, and the numbers are one device's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers
from support.parity import difference, variables
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.partition.rules.lookups import Lookup
from keras_multigpu.engines.tensorflow.weights import homes
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.layers import MultiHotDense
from keras_multigpu.reports import memory, transfers

WIDTH, ONES, ROWS = 103, 5, 11  # no number of devices divides the width


@pytest.fixture(autouse=True)
def _small_tables_are_spread(monkeypatch):
    monkeypatch.setattr(homes, "LEAST", 1)
    with all_in_double_precision():
        yield


@pytest.fixture
def lookups(monkeypatch):
    """What was looked up: the number of tables' parts, by each device in each lookup."""
    seen, sums = [], Lookup.sums

    def noted(self, part):
        seen.append(self.local.count)
        return sums(self, part)

    monkeypatch.setattr(Lookup, "sums", noted)
    return seen


def _build(head=lambda x: layers.Dense(2)(x), units=4, width=WIDTH, **options):
    keras.utils.set_random_seed(1)
    i = keras.Input((ONES,), dtype="int32")
    x = MultiHotDense(units, width, activation="tanh", name="table", **options)(i)
    return keras.Model(i, head(x))


def _data(rows=ROWS, width=WIDTH, padding=None, outputs=2):
    rng = np.random.default_rng(0)
    x = rng.integers(0, width, (rows, ONES))
    x[:, 1] = x[:, 0]  # repeated in a row, and in several rows
    starts = {k * (width // n) + min(k, width % n) for n in (2, 3, 4) for k in range(1, n)}
    x[0] = np.resize([one % width for one in sorted(starts)], ONES)  # the parts' first rows
    x[1] = (x[0] - 1) % width  # and last ones
    x[4] = x[0]
    x[2:4, 2:] = (0, width - 1, width - 1)
    if padding is not None:
        x[2:][rng.random(x[2:].shape) < 0.3] = padding
    return x, rng.normal(size=(rows, outputs))


def _train(model, optimizer, data=None, batch_size=4, **options):
    x, y = data or _data()
    model.compile(optimizer, "mse", **options)
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return [*variables(model), model.predict(x, batch_size=batch_size, verbose=0)]


def _same(build, optimizer, n=4, data=None, limit=1e-12, batch_size=4, **options):
    """Trains a plain and a parallel model; they must end with the same numbers."""
    parallel = make_parallel(build(), n, shard="weights")
    plain = _train(build(), optimizer(), data, batch_size, jit_compile=False)
    found = _train(parallel, optimizer(), data, batch_size, **options)
    assert difference(plain, found) < limit
    return parallel


def _sent(parallel, kinds=("weights", "gradients", "activations", "other"), data=None):
    """What crosses in a training step, and the number of tensors whose size is not known."""
    found = [one for one in transfers(parallel, data or _data()).training if one.kind in kinds]
    return sum(one.bytes or 0 for one in found), sum(one.bytes is None for one in found)


adam = functools.partial(optimizers.Adam, 0.02)
OPTIMIZERS = {
    "adam": adam,
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "decayed": lambda: optimizers.AdamW(0.02, weight_decay=0.1, use_ema=True),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "lamb": lambda: optimizers.Lamb(0.02),
    "clipped": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.02),
    "clipped_all": lambda: optimizers.RMSprop(0.01, global_clipnorm=0.02),
    "accumulated": lambda: optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(adam(), initial_scale=8.0),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, sparse, lookups):
    n = 2 + list(OPTIMIZERS).index(name) % 3
    parallel = _same(
        lambda: _build(sparse_gradient=sparse, padding=-1), OPTIMIZERS[name], n, _data(padding=-1)
    )
    assert set(lookups) == {n}
    slots = [one for one in parallel.optimizer.variables if one.shape == (WIDTH, 4)]
    assert all(division_of(one) == division_of(parallel.weights[0]) for one in slots)


@pytest.mark.thin(2)
@pytest.mark.parametrize("rows", [1, 3, ROWS])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "xla"])
def test_batches_of_any_size(compiled, rows, lookups):
    _same(_build, adam, 4, _data(max(rows, 5))[:2], batch_size=rows, jit_compile=compiled)
    assert set(lookups) == {4}


@pytest.mark.filterwarnings("ignore:.*runs eagerly, and so on")
def test_eager_steps_gather_the_table(lookups):
    _same(_build, adam, 3, run_eagerly=True)
    assert not lookups


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "xla"])
def test_learned_weights_masks_and_statistics(compiled, lookups):
    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        w = layers.Dense(ONES, "tanh")(layers.Embedding(WIDTH, 3)(i)[:, 0])
        w = layers.BatchNormalization(momentum=0.5)(w)
        first = MultiHotDense(4, WIDTH, padding=-1, name="first")(i, w)
        shared = MultiHotDense(3, WIDTH, name="second", kernel_regularizer="l2")
        both = [shared(i % WIDTH), shared(i // 2 % WIDTH)]
        x = layers.BatchNormalization(momentum=0.5)(layers.Concatenate()([first, *both]))
        return keras.Model(i, layers.Dense(2)(x))

    # Not Adam: before a BatchNormalization, biases have gradients of rounding only.
    sgd = functools.partial(optimizers.SGD, 0.1, momentum=0.9)
    _same(build, sgd, 4, _data(rows=12, padding=-1), jit_compile=compiled)
    assert set(lookups) == {4}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_types_of_indices(dtype, lookups):
    def build():
        keras.utils.set_random_seed(1)
        table = MultiHotDense(4, 300, name="table")
        return keras.Sequential([keras.Input((ONES,), dtype=dtype), table, layers.Dense(2)])

    x, y = _data(width=250)
    _same(build, adam, 2, (x.astype(dtype), y))
    assert set(lookups) == {2}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("sparse", "compiled"),
    [(False, False), (False, True), (True, False)],
    ids=["dense", "xla", "sparse"],
)
def test_no_row_crosses(sparse, compiled, caplog):
    sent = []
    for width in (1001, 4005):
        parallel = make_parallel(_build(width=width, sparse_gradient=sparse), 4, shard="weights")
        parallel.compile(adam(), "mse", jit_compile=compiled)
        sent.append(_sent(parallel))
    assert sent[0] == sent[1]
    assert sent[0][0] < 1001 * 4 * 8 / 4
    assert sent[0][1] == 0  # touched rows, whose number is not known, don't cross either
    assert not [one for one in caplog.messages if "not a valid node name" in one]


def test_without_shard_the_table_crosses():
    parallel = make_parallel(_build(width=1001), 4)
    parallel.compile(adam(), "mse", jit_compile=True)
    assert _sent(parallel)[0] > 3 * 1001 * 4 * 8


@pytest.mark.slow
def test_evaluation_and_prediction_look_up_too(lookups):
    parallel = make_parallel(_build(width=4004), 4, shard="weights")
    parallel.compile(adam(), "mse")
    x, y = _data()
    parallel.evaluate(x, y, verbose=0)
    parallel.predict(x, verbose=0)
    assert lookups == [4] * 8
    report = transfers(parallel, (x, y))
    assert sum(one.bytes for one in report.prediction) < 4004 * 8


def test_the_reports_count_the_table_where_it_is():
    parallel = make_parallel(_build(width=4004), 4, shard="weights")
    parallel.compile(adam(), "mse")
    report = transfers(parallel, _data())
    assert report.least == 2 * 3 * 8 * (4 + 4 * 2 + 2)  # of all but the table
    held = memory(parallel, _data())
    assert held.bytes(kind="copies") < 4004 * 4 * 8 / 4
    assert held.bytes("cpu:2", "weights") - 1001 * 4 * 8 < 14 * 8 + 1
    assert parallel.placement["table/kernel"] == (1001 * 4,) * 4


class Tied(layers.Layer):
    """Uses another layer's kernel whole."""

    def __init__(self, table, how):
        super().__init__()
        self.table, self.how = table, how
        self.gate = self.add_weight((), "ones", trainable=False)

    def call(self, x):
        kernel = self.table.kernel
        if self.how == "product":
            return x @ ops.transpose(kernel)
        if self.how == "branch":
            return ops.cond(self.gate > 0, lambda: x + ops.sum(kernel), lambda: x * 2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ops.sum(ops.tanh(x) * ops.mean(kernel))
        return tape.gradient(y, x)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("how", ["product", "branch", "tape"])
def test_a_kernel_that_is_also_read_whole(how, compiled, lookups):
    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        table = MultiHotDense(4, WIDTH, name="table")
        other = MultiHotDense(3, WIDTH, name="other")
        joined = layers.Concatenate()([Tied(table, how)(table(i)), other(i)])
        return keras.Model(i, layers.Dense(2)(joined))

    parallel = _same(build, adam, 3, jit_compile=compiled)
    assert set(lookups) == {3}
    assert division_of(parallel.get_layer("table").kernel) is not None


class Inside(layers.Layer):
    """Looks up where a segment can't end."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table = MultiHotDense(4, WIDTH, name="table")
        self.gate = self.add_weight((), "ones", trainable=False)

    def build(self, shape):
        self.table.build(shape)

    def call(self, indices):
        if self.how == "branch":
            return ops.cond(
                self.gate > 0, lambda: self.table(indices), lambda: self.table(indices * 0)
            )
        if self.how == "function":
            return tf.function(self.table)(indices)
        return keras.remat(self.table)(indices)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["branch", "function", "remat"])
def test_tables_in_branches_and_functions(how, lookups):
    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((ONES,), dtype="int32"), Inside(how)])
        model.add(layers.Dense(2))
        return model

    _same(build, adam, 3, jit_compile=False)
    assert set(lookups) == {3}


@pytest.mark.slow
def test_layers_after_which_a_call_can_not_be_cut(lookups):
    """An operation with a custom gradient takes a tensor from before the lookup."""

    class Silu(layers.Layer):
        def call(self, i, x):
            y = ops.cast(i, "float64") / WIDTH
            return ops.concatenate([tf.nn.silu(y), x], axis=1)

    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        x = MultiHotDense(4, WIDTH, name="table")(i)
        return keras.Model(i, layers.Dense(2)(Silu()(i, x)))

    _same(build, adam, 3)
    assert set(lookups) == {3}


@pytest.mark.slow
def test_recurrent_layers_beside_a_table(lookups):
    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        x = layers.LSTM(3)(layers.Embedding(WIDTH, 3)(i))
        table = MultiHotDense(4, WIDTH, name="table")(i)
        return keras.Model(i, layers.Dense(2)(layers.Concatenate()([x, table])))

    _same(build, adam, 2, jit_compile=True)
    assert set(lookups) == {2}


@pytest.mark.slow
def test_constraints_regularizers_and_frozen_kernels(lookups):
    def build(trainable=True):
        model = _build(kernel_constraint="unit_norm", kernel_regularizer="l1")
        model.get_layer("table").trainable = trainable
        return model

    _same(build, adam, 4)
    _same(lambda: build(False), adam, 4)
    assert set(lookups) == {4}


def test_outputs_that_no_loss_uses_give_the_table_no_gradient():
    class First(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.mean((y_true - y_pred) ** 2, axis=-1)

    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        used, unused = (MultiHotDense(2, WIDTH, name=name)(i) for name in ("used", "unused"))
        return keras.Model(i, {"used": used, "unused": unused})

    x, y = _data()
    found = []
    for model in (build(), make_parallel(build(), 4, shard="weights")):
        model.compile(optimizers.AdamW(0.02, weight_decay=0.5), {"used": First()})
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            model.fit(x, {"used": y}, batch_size=4, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert difference(*found) < 1e-12


@pytest.mark.parametrize("index", [-1, WIDTH])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_index_of_no_row_is_an_error(index, weighted):
    parallel = make_parallel(_build(padding=-7 if weighted else None), 4, shard="weights")
    parallel.compile(adam(), "mse", jit_compile=False)
    x, y = _data()
    x[3, 2] = index
    told = f"Indices must be from 0 to {WIDTH - 1}, the last row of .*Received: indices from"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        parallel.fit(x, y, verbose=0)


def test_an_index_beyond_an_embedding_is_an_error():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(1000, 4)])
    parallel = make_parallel(model, 4, shard="weights")
    x = np.zeros((9, 3))
    x[7, 1] = 1000
    with pytest.raises(tf.errors.InvalidArgumentError, match="Indices must be from 0 to 999"):
        parallel.predict(x, verbose=0)


@pytest.mark.slow
def test_derivatives_outside_of_fit():
    x = tf.constant(_data()[0])
    found = []
    for model in (_build(), make_parallel(_build(), 4, shard="weights")):

        @tf.function
        def penalty(model=model):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(tf.tanh(model(x)) ** 2)
                gradients = inner.gradient(loss, model.trainable_weights)
                total = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(g) ** 2) for g in gradients])
            return outer.gradient(total, model.trainable_weights), gradients

        loss = tf.function(lambda model=model: tf.reduce_sum(model(x) ** 2))
        loss()  # traced before any tape
        with tf.GradientTape() as tape:
            value = loss()
        later = tape.gradient(value, model.trainable_weights)
        both = [one for part in penalty() for one in part]
        found.append([tf.convert_to_tensor(one).numpy() for one in (*both, *later)])
    assert difference(*found) < 1e-12


def test_a_saved_training_goes_on_anywhere(tmp_path):
    plain, parallel = _build(), make_parallel(_build(), 4, shard="weights")
    for model in (plain, parallel):
        _train(model, adam())
    parallel.save(tmp_path / "some.keras")
    parallel.save_weights(tmp_path / "some.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "some.keras")
    other = make_parallel(_build(), 3, shard="weights")
    other.compile(adam(), "mse")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "some.weights.h5")
    x, y = _data()
    for model in (plain, parallel, loaded, other):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for model in (parallel, loaded, other):
        assert difference(variables(plain), variables(model)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_other_precisions(policy, lookups):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    limit = 1e-6 if policy == "float32" else 2e-2
    for sparse in (False, True):
        build = functools.partial(_build, sparse_gradient=sparse, padding=-1)
        parallel = make_parallel(build(), 4, shard="weights", wire_dtype="bfloat16")
        _train(parallel, adam(), _data(padding=-1))
        _same(build, lambda: optimizers.SGD(0.1), 4, _data(padding=-1), limit)
    assert set(lookups) == {4}


def test_small_tables_and_tables_of_few_rows_are_whole(monkeypatch):
    parallel = make_parallel(_build(width=3, units=50), 4, shard="weights")
    division = division_of(parallel.get_layer("table").kernel)
    assert division is None or division.axis == 1
    _same(lambda: _build(width=3, units=50), adam, 4, _data(width=3))
    monkeypatch.setattr(homes, "LEAST", 1024)
    parallel = make_parallel(_build(head=layers.Dense(2)), 4, shard="weights")
    assert division_of(parallel.get_layer("table").kernel) is None


def test_a_table_that_is_sent_after_one_that_is_not(lookups, monkeypatch):
    """It is computed in another segment than the one that it came in with."""
    monkeypatch.setattr(homes, "LEAST", 2**12)

    def build():
        keras.utils.set_random_seed(1)
        i = keras.Input((ONES,), dtype="int32")
        large = MultiHotDense(8, 1001, name="table")(i)
        small = MultiHotDense(4, WIDTH, padding=-1)(i)
        return keras.Model(i, layers.Dense(2)(layers.Concatenate()([large, small])))

    _same(build, adam, 2)
    assert lookups
    lookups.clear()
    make_parallel(build(), 2, shard="weights").predict(_data()[0], verbose=0)
    assert lookups == [2, 2]
