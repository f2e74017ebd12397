"""Variables that are stored in parts: to Keras, TensorFlow and the user they are one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from support.parity import difference, plainly, variables
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.weights import homes, placing
from keras_multigpu.engines.tensorflow.weights.divided import division_of, parts_of
from keras_multigpu.layers import MultiHotDense

N = 4


@pytest.fixture(autouse=True)
def _all_are_divided(monkeypatch):
    monkeypatch.setattr(homes, "LEAST", 1)
    with all_in_double_precision():
        yield


def _dense(units=8):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), layers.Dense(units, use_bias=False)])


def _batch(model, rows=10):
    rng = np.random.default_rng(0)
    shape = model.input_shape[1:]
    is_int = model.inputs[0].dtype == "int32"
    x = rng.integers(0, 4, (rows, *shape)) if is_int else rng.normal(size=(rows, *shape))
    return x, rng.normal(size=(rows, *model.output_shape[1:]))


def _same(build, optimizer, after=lambda parallel: parallel, **options):
    """Trains a plain and a parallel model; they must end with the same numbers."""
    plain = build()
    trained = [plain, after(make_parallel(build(), N, shard="weights"))]
    for model in trained:
        settings = plainly(**options) if model is plain else {"jit_compile": False, **options}
        model.compile(optimizer(), "mse", **settings)
        model.fit(*_batch(plain), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert difference(*map(variables, trained)) < 1e-10
    return trained[1]


def test_a_function_traced_before_any_tape_keeps_its_gradient():
    parallel = make_parallel(_dense(), N, shard="weights")
    x = tf.random.normal((6, 8), dtype="float64")
    for call in (parallel.template, parallel):
        inner = tf.function(lambda x, call=call: tf.reduce_sum(call(x) ** 2))
        for outer in (inner, tf.function(lambda x, inner=inner: inner(x))):
            outer(x)
            with tf.GradientTape() as tape:
                loss = outer(x)
            (gradient,) = tape.gradient(loss, parallel.trainable_weights)
            kernel = parallel.get_weights()[0]
            assert difference(gradient.numpy(), 2 * x.numpy().T @ (x.numpy() @ kernel)) < 1e-12


def test_second_derivatives():
    x = tf.random.normal((6, 8), dtype="float64")
    found = []
    for model in (_dense(), make_parallel(_dense(), N, shard="weights")):

        @tf.function
        def penalty(model=model):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(tf.tanh(model(x)) ** 2)
                (gradient,) = inner.gradient(loss, model.trainable_weights)
                total = tf.reduce_sum(gradient**2)
            return outer.gradient(total, model.trainable_weights)

        found.append(penalty()[0].numpy())
    assert difference(*found) < 1e-10


@pytest.mark.parametrize("shape", [(12, 4), (4, 12), (4, 4)], ids=str)
@pytest.mark.parametrize("optimizer", [optimizers.Adam, optimizers.Adagrad, optimizers.Lamb])
@pytest.mark.thin(4)
def test_tables(shape, optimizer):
    def build():
        keras.utils.set_random_seed(0)
        table = layers.Embedding(*shape)
        return keras.Sequential(
            [keras.Input((3,), dtype="int32"), table, layers.Flatten(), layers.Dense(2)]
        )

    parallel = _same(build, lambda: optimizer(0.05))
    assert len(parts_of(parallel.template.layers[0].embeddings)) == N


def test_a_table_that_one_branch_reads_by_rows_and_another_whole():
    """Repeated rows of a sparse gradient are squared one by one, as on one device."""

    class Read(layers.Embedding):
        def call(self, x):
            whole = lambda: super(Read, self).call(x) + keras.ops.mean(self.embeddings, 0)  # noqa: E731
            return keras.ops.cond(keras.ops.sum(x) >= 0, lambda: super(Read, self).call(x), whole)

    def build():
        keras.utils.set_random_seed(0)
        x = keras.Input((1,), dtype="int32")
        return keras.Model(x, layers.Dense(2)(layers.Flatten()(Read(8, 4)(x))))

    parallel = _same(build, lambda: optimizers.Adagrad(0.05))
    assert "100.0% of the work on rows is spread" in parallel.explain()


@pytest.mark.parametrize("layer", [lambda: layers.Embedding(9, 4), lambda: MultiHotDense(4, 9)])
def test_places_that_a_table_of_keys_gives(layer):
    """Their number of axes is known by the user's code alone."""

    def build():
        keras.utils.set_random_seed(0)
        x = keras.Input((3,), dtype="int32")
        places = layers.IntegerLookup(vocabulary=list(range(8)))(x)
        return keras.Model(x, layers.Dense(2)(layers.Flatten()(layer()(places))))

    parallel = _same(build, lambda: optimizers.Adam(0.05))
    x, _ = _batch(parallel)
    assert difference(parallel.template(x), parallel.predict(x, verbose=0)) < 1e-10


@pytest.mark.filterwarnings("ignore:.*was made and never used")
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_that_loops_and_branches_read(alone):
    class Branch(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return keras.ops.cond(
                keras.ops.sum(x) > 0, lambda: x * self.scale, lambda: x - self.scale
            )

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((5, 4)), layers.LSTM(4), *([Branch()] if alone else []), layers.Dense(4)]
        )

    _same(build, lambda: optimizers.Adam(0.02), lambda one: one.template if alone else one)


def test_a_branch_reads_what_it_has_assigned():
    model = _dense()
    make_parallel(model, N, shard="weights")
    value = model.layers[0].kernel.value

    @tf.function
    def read(is_changed):
        def changed():
            value.assign(tf.ones((8, 8), "float64"))
            return tf.reduce_sum(value.read_value())

        with tf.GradientTape():
            return tf.cond(is_changed, changed, lambda: tf.reduce_sum(value.read_value()))

    assert read(tf.constant(False)) == value.numpy().sum() != 64
    assert read(tf.constant(True)) == 64


def test_an_optimizer_for_other_devices_than_its_slots_were_made_for():
    plain, template = _dense(12), _dense(12)
    used = [optimizers.Adam(0.02), optimizers.Adam(0.02)]
    for devices in (4, 3):
        for model, optimizer in zip(
            (plain, make_parallel(template, devices, shard="weights")), used
        ):
            model.compile(optimizer, "mse")
            model.fit(*_batch(plain), batch_size=4, shuffle=False, verbose=0)
        slots = [division_of(slot) for slot in used[1].variables[2:]]
        assert slots == [division_of(template.weights[0])] * 2
        assert len(slots[0].sizes) == devices
    assert difference(plain.get_weights(), template.get_weights()) < 1e-12


def test_slots_of_another_division_are_updated_whole(monkeypatch):
    plain, template = _dense(), _dense()
    used = [optimizers.Adam(0.02), optimizers.Adam(0.02)]
    parallel = make_parallel(template, N, shard="weights")
    parallel.compile(used[1], "mse")
    used[1].build(template.trainable_variables)
    for slot in used[1].variables[2:]:
        placing.move_variable(slot, "cpu:0")
    plain.compile(used[0], "mse")
    for model in (plain, parallel):
        model.fit(*_batch(plain), batch_size=4, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), template.get_weights()) < 1e-12


def test_weights_with_the_same_path_have_their_own_slots():
    class Twins(layers.Layer):
        def __init__(self):
            super().__init__(name="twins")
            self.both = [layers.Dense(8, name="same", use_bias=False) for _ in range(2)]

        def build(self, shape):
            for one in self.both:
                one.build(shape)

        def call(self, x):
            return self.both[1](keras.ops.tanh(self.both[0](x)))

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((8,)), Twins(), layers.Dense(2)], name="net")

    plain, template = build(), build()
    for model in (plain, template):
        model.compile(optimizers.Adam(0.02), "mse")
        model.optimizer.build(model.trainable_variables)
    parallel = make_parallel(template, N, shard="weights")
    for model in (plain, parallel):
        model.fit(*_batch(plain), batch_size=4, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 1e-12


def test_whole_slots_are_on_no_device_of_the_model(monkeypatch):
    template = _dense()
    parallel = make_parallel(template, devices=["cpu:1", "cpu:2", "cpu:3"], shard="weights")
    parallel.compile("adam", "mse")
    moved, move = [], homes.move_variable

    def noted(variable, home):
        before = variable._value.device[-5:]
        return move(variable, home) and not moved.append(before)

    monkeypatch.setattr(homes, "move_variable", noted)
    parallel.fit(*_batch(template), verbose=0)
    assert moved == ["CPU:0"] * 2


def test_a_tape_that_watches_the_tensorflow_variable():
    model = _dense()
    make_parallel(model, N, shard="weights")
    value = model.layers[0].kernel.value
    assert tf.is_tensor(value)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(value)
        loss = tf.reduce_sum(model(tf.ones((3, 8), "float64")))
    assert difference(tape.gradient(loss, value).numpy(), 3 * np.ones((8, 8))) < 1e-12


def test_weights_that_are_overwritten_with_their_gradient():
    class Largest(layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(8,), initializer="zeros")
            self.seen.overwrite_with_gradient = True

        def call(self, x):
            @tf.custom_gradient
            def note(x, seen):
                largest = tf.reduce_max(tf.abs(x), axis=0)
                return tf.identity(x), lambda upstream: (upstream, tf.maximum(seen, largest))

            return note(x, tf.convert_to_tensor(self.seen))

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((8,)), Largest(), layers.Dense(8)])

    _same(build, lambda: optimizers.SGD(0.1))


def test_read_assigned_frozen_and_exported(tmp_path):
    first = layers.Dense(8, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), first, layers.Dense(8)])
    parallel = make_parallel(model, N, shard="weights")
    kernel = model.layers[0].kernel
    assert len(parts_of(kernel)) == N
    value = np.arange(64.0).reshape(8, 8)
    kernel.assign(value)
    assert (kernel.numpy() == value).all()
    assert (np.asarray(kernel._value) == value).all()
    with pytest.raises(ValueError, match="incompatible"):
        kernel._value.assign(tf.ones(8, "float64"))
    kernel._value.scatter_sub(tf.IndexedSlices(tf.ones((2, 8), "float64"), tf.constant([1, 1])))
    assert (kernel.numpy()[1] == value[1] - 2).all()
    x = np.ones((3, 8))
    parallel.export(tmp_path / "served", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "served")
    served = loaded.serve(tf.constant(x, "float64"))
    assert difference(served.numpy(), parallel.predict(x, verbose=0)) < 1e-12
    assert len(parts_of(kernel)) == N
    with pytest.raises(ValueError, match="A SavedModel must have whole weights"):
        model.export(tmp_path / "other", verbose=False)
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    before = kernel.numpy()
    kernel.assign(value)
    checkpoint.read(path).assert_consumed()
    assert (kernel.numpy() == before).all()
    kernel.trainable = False
    parallel.compile("adam", "mse")
    parallel.fit(*_batch(model), verbose=0)
    assert (kernel.numpy() == before).all()
