"""On which devices data mode computes, how often it is traced, and what it leaves as it is."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference
from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251

from keras_multigpu import make_parallel, reports

pytestmark = pytest.mark.thin(4)


class Probe(layers.Layer):
    """Counts how often it is traced, and notes the rows it is given."""

    traces = 0

    def call(self, inputs):
        type(self).traces += 1
        tf.debugging.assert_positive(tf.shape(inputs)[0], "an empty slice")
        return inputs


def _step_graph(parallel, x, y):
    """The operations of a training step, with those of the functions it calls."""
    parallel.make_train_function()
    step = tf.function(lambda a, b: parallel.train_step((a, b))).get_concrete_function(x, y)
    return step.graph.as_graph_def()


def _devices(parallel):
    """The devices that compute a training step."""
    parallel.compile("sgd", "mse", jit_compile=False)
    graph = _step_graph(parallel, tf.zeros((8, 3)), tf.zeros((8, 2)))
    calls = [node for node in graph.node if "PartitionedCall" in node.op or node.op == "MatMul"]
    return {node.device[-5:] for node in calls}


def test_made_within_a_device_scope_or_loaded_it_runs_on_all_devices(tmp_path):
    every = {f"CPU:{index}" for index in range(4)}
    with tf.device("/cpu:1"):
        parallel = make_parallel(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), 4)
        assert _devices(parallel) == every
    parallel.save(tmp_path / "model.keras")
    assert _devices(keras.saving.load_model(tmp_path / "model.keras")) == every


def _operations(model, x, y):
    """How often each kind of operation is in a training step, with the functions that it calls."""
    model.compile("adam", "mse", jit_compile=False)
    model.train_on_batch(x, y)
    graph = _step_graph(model, tf.constant(x), tf.constant(y))
    bodies = [body.node_def for body in graph.library.function]
    return collections.Counter(node.op for nodes in (graph.node, *bodies) for node in nodes)


@pytest.mark.parametrize("layer", [layers.Dense, layers.LSTM, layers.SimpleRNN])
def test_one_device_takes_keras_own_step(layer, rng):
    """Operation by operation: it can't be slower. On another device it is a program of ours."""
    x = rng.normal(size=(8, 4, 3)).astype("float32")
    plain = keras.Sequential([keras.Input((4, 3)), layer(5), layers.Flatten(), layers.Dense(2)])
    own, elsewhere = (keras.models.clone_model(plain) for _ in range(2))
    y = rng.normal(size=(8, 2)).astype("float32")
    expected = _operations(plain, x, y)
    assert _operations(make_parallel(own, 1), x, y) == expected
    assert _operations(make_parallel(elsewhere, devices=["cpu:1"]), x, y) != expected


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_xla_is_chosen_where_keras_would(kind, monkeypatch):
    """On a host with a GPU; and not lost by going parallel."""
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    parallel = make_parallel(keras.models.clone_model(plain), 4)
    devices = [tf.config.PhysicalDevice(f"/physical_device:{kind}:0", kind)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *args: devices)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        assert model.jit_compile is (kind == "GPU")


def test_traced_once_for_all_devices_and_batch_sizes():
    Probe.traces = 0
    template = keras.Sequential([keras.Input((3,)), Probe(), layers.Dense(2)])
    built = Probe.traces
    parallel = make_parallel(template, 4)
    parallel.compile("adam", "mse")
    x, y = np.zeros((70, 3)), np.zeros((70, 2))
    parallel.fit(x, y, batch_size=32, epochs=2, verbose=0)
    assert Probe.traces - built == 1  # on one device the first of two makes the optimizer's slots
    for rows in (1, 2, 3, 5, 33):
        parallel.fit(x[:rows], y[:rows], verbose=0)
    assert Probe.traces - built == 1


class Late(keras.metrics.Metric):
    """Counts batches, but for those in which it makes its variable."""

    total = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.total is None:
            self.total = self.add_variable((), "zeros", name="total")
        else:
            self.total.assign_add(1.0)

    def result(self):
        return self.total.value


@pytest.mark.parametrize("metric", ["mae", "late"])
def test_a_step_is_traced_again_if_its_code_may_ask_for_variables_that_it_has_made(metric):
    Probe.traces = 0
    template = keras.Sequential([keras.Input((3,)), Probe(), layers.Dense(2)])
    built = Probe.traces
    parallel = make_parallel(template, 4)
    metrics = [metric, "mse"] if metric == "mae" else [Late(), "mse"]
    parallel.compile("adam", "mse", metrics=metrics, weighted_metrics=["mae"])
    found = parallel.fit(np.zeros((70, 3)), np.zeros((70, 2)), batch_size=10, verbose=0).history
    assert Probe.traces - built == (1 if metric == "mae" else 2)
    if metric == "late":
        assert found["late"] == [7]  # as on one device


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_after_one_that_failed(optimizer):
    parallel = make_parallel(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), 4)
    parallel.compile(optimizer, "mse")
    x = np.ones((8, 3))
    with pytest.raises(ValueError, match="shape"):
        parallel.train_on_batch(x, np.ones((8, 5)))
    before = parallel.get_weights()
    assert parallel.train_on_batch(x, np.zeros((8, 2))) > 0
    assert difference(before, parallel.get_weights()) > 1e-4


class WithoutUpdates(keras.Model):
    """Its step never uses the optimizer, and so makes no variables."""

    def train_step(self, data):
        x, y = data
        return {"loss": self.compute_loss(x, y, self(x, training=True))}


def _traces(model):
    """How often the probe in a model is traced over fifty batches of five sizes, and all calls."""
    built = Probe.traces
    model.compile("adam", "mse")
    for start in range(0, 50, 10):
        sizes = [1, 2, 5, 8, 33] * 2
        batches = [(np.ones((size, 3)), np.ones((size, 2))) for size in sizes]
        generator = (batch for batch in batches)
        model.fit(generator, steps_per_epoch=len(batches), shuffle=False, verbose=0)
        assert model.optimizer.iterations == start + 10
    for x, y in batches[:5]:
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    return Probe.traces - built


def test_traced_no_more_often_than_on_one_device(monkeypatch):
    functions = []
    plain_function = tf.function

    def function(*args, **kwargs):
        made = plain_function(*args, **kwargs)
        functions.extend([made] if hasattr(made, "experimental_get_tracing_count") else [])
        return made

    monkeypatch.setattr(tf, "function", function)
    template = keras.Sequential([keras.Input((3,)), Probe(), layers.Dense(2)])
    plain = _traces(keras.models.clone_model(template))
    assert _traces(make_parallel(template, 4)) <= plain
    counts = [one.experimental_get_tracing_count() for one in functions]
    assert len(counts) >= 4  # a step of each call, and the replicas
    assert max(counts) <= 2


def test_no_empty_slice_and_finite_batch_normalization():
    template = keras.Sequential([keras.Input((3,)), Probe(), layers.BatchNormalization()])
    parallel = make_parallel(template, 4)
    parallel.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    for rows in (1, 2, 3, 5):
        x = rng.normal(size=(rows, 3))
        loss = parallel.train_on_batch(x, x)
        assert np.isfinite(loss)
        assert np.isfinite(parallel.evaluate(x, x, verbose=0))
    assert all(np.isfinite(weight).all() for weight in parallel.get_weights())


def test_every_row_has_its_own_numbers_and_every_step_others():
    template = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)])
    parallel = make_parallel(template, 4)
    step = tf.function(lambda x: parallel(x, training=True))
    x = tf.ones((8, 50))
    first, second = step(x).numpy(), step(x).numpy()
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 16
    assert 0.3 < (first == 0).mean() < 0.7


@pytest.mark.filterwarnings("ignore:.*eagerly under a tape")
def test_the_gradient_reaches_the_inputs_and_goes_through_twice():
    template = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )
    parallel = make_parallel(template, 4)

    @tf.function
    def penalty(model, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model(x)
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(tf.reduce_sum(slope**2, axis=1))
        weights = [variable.value for variable in model.trainable_variables[:3]]
        return slope, outer.gradient(loss, weights)

    x = tf.constant(np.random.default_rng(0).normal(size=(7, 3)), tf.float32)
    assert difference(penalty(template, x), penalty(parallel, x)) < 1e-6
    eager = penalty.python_function
    assert difference(eager(template, x), eager(parallel, x)) < 1e-6


@pytest.mark.filterwarnings("ignore:.*eagerly under a tape")
def test_a_persistent_tape_gives_gradients_again():
    template = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    parallel = make_parallel(template, 2)

    def twice(model, x):
        with tf.GradientTape(persistent=True) as tape:
            y = model(x)
            losses = tf.reduce_sum(y**2), tf.reduce_sum(y)
        kernel = template.trainable_variables[0].value
        return [tape.gradient(loss, kernel) for loss in losses]

    x = tf.constant(np.random.default_rng(0).normal(size=(5, 3)), tf.float32)
    for run in (twice, tf.function(twice)):
        assert difference(run(template, x), run(parallel, x)) < 1e-5


def test_an_embeddings_gradient_stays_the_rows_it_touches():
    template = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(1000, 3)])
    parallel = make_parallel(template, 4)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(parallel(x) ** 2)
        return tape.gradient(loss, template.trainable_variables[0].value)

    slices = gradient(tf.constant([[1, 2], [3, 4], [5, 6], [1, 7], [1, 1]]))
    assert isinstance(slices, tf.IndexedSlices)
    assert sorted(slices.indices.numpy()) == [1, 1, 1, 1, 2, 3, 4, 5, 6, 7]


def test_weights_cross_in_the_wires_type():
    def build(wire_dtype):
        keras.utils.set_random_seed(1)
        template = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        return make_parallel(template, 4, wire_dtype=wire_dtype)

    x = np.random.default_rng(0).normal(size=(9, 6)).astype("float32")
    exact, rounded = build(None), build("bfloat16")
    kernel = exact.get_weights()[0]
    expected = x @ tf.cast(tf.cast(kernel, "bfloat16"), "float32").numpy()
    assert difference(rounded.predict(x, verbose=0), expected) < 1e-5
    assert difference(exact.predict(x, verbose=0), x @ kernel) < 1e-5
    assert 1e-4 < difference(expected, x @ kernel) < 0.1
    for model in (exact, rounded):
        model.compile("sgd", "mse")
        model.fit(x, np.ones((9, 4)), verbose=0)
    assert 0 < difference(exact.get_weights(), rounded.get_weights()) < 1e-2


def test_eager_towers_of_one_model_run_on_the_device_of_its_weights(rng):
    """Keras compiles convolutions in groups, which take weights of their own device only."""
    keras.utils.set_random_seed(1)
    grouped = layers.Conv1D(4, 2, groups=2)
    plain = keras.Sequential([keras.Input((5, 2)), grouped, layers.Flatten(), layers.Dense(1)])
    tower = make_parallel(keras.models.clone_model(plain), 3, "tower")
    tower.set_weights(plain.get_weights())
    x, y = rng.normal(size=(7, 5, 2)), rng.normal(size=(7, 1))
    for model in (plain, tower):
        model.compile("adam", "mse", run_eagerly=True)
    plain.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    with pytest.warns(UserWarning, match="runs eagerly, and so on 'cpu:0' alone") as told:
        tower.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert len([one for one in told if "runs eagerly" in str(one.message)]) == 1
    assert difference(plain.get_weights(), tower.get_weights()) < 1e-6


@pytest.mark.parametrize("options", [{}, {"mode": "tower", "replicas": "independent"}], ids=str)
def test_models_that_are_dropped_are_freed(options):
    template = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    parallel = make_parallel(template, 2, **options)
    parallel.compile("sgd", "mse")
    parallel.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    parallel.predict(np.ones((8, 3)), verbose=0)
    alive = [weakref.ref(template), weakref.ref(parallel)]
    del template, parallel
    keras.utils.clear_session()
    gc.collect()
    assert [one() for one in alive] == [None, None]


@pytest.mark.slow
def test_the_values_of_a_loop_stay_on_their_device(rng):
    """Of a recurrent layer cross what of any other does: nothing that the loop keeps."""
    x, y = rng.integers(0, 50, (8, 12)), rng.normal(size=(8, 3))
    model = keras.Sequential(
        [keras.Input((12,), dtype="int32"), layers.Embedding(50, 4), layers.GRU(5), layers.Dense(3)]
    )
    parallel = make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, (x, y))
    back = [one for one in report.training if (one.source, one.target) == ("cpu:1", "cpu:0")]
    # The loss, and the gradients of the weights; the embedding's is rows and their places.
    assert len(back) <= 1 + len(parallel.trainable_variables) + 1
    assert all(one.bytes is not None for one in report.training)
    assert sum(one.kind == "activations" for one in back) <= 2  # what the rows change, too
    there = [one for one in report.training if (one.source, one.target) == ("cpu:0", "cpu:1")]
    assert {one.kind for one in there} == {"weights", "inputs", "other"}


def test_weights_that_are_cut_among_devices(rng):
    """They are put together again, and their gradients, as if they had crossed whole."""
    x, y = rng.normal(size=(30, 64)).astype("float32"), rng.normal(size=(30, 4))
    template = keras.Sequential([keras.Input((64,)), layers.Dense(512, "tanh"), layers.Dense(4)])
    plain = keras.models.clone_model(template)
    plain.set_weights(template.get_weights())
    parallel = make_parallel(template, 4)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights()):
        assert np.abs(one - other).max() < 2e-6


@pytest.mark.slow
def test_no_gradient_of_ours_keeps_a_graph(rng):
    """TensorFlow keeps the gradients of `tf.custom_gradient` forever."""
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    )
    kept = []
    for devices in (1, 4):
        trained, counts = make_parallel(model, devices), []
        for _ in range(2):
            trained.compile("adam", "mse")
            trained.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
            trained.predict(np.ones((8, 3)), verbose=0)
            counts.append(len(gradient_registry._registry))
        kept.append(counts[1] - counts[0])
    assert kept[1] <= kept[0]


class Scales(keras.Model):
    """Is called with a number."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs, factor=None):
        return self.dense(inputs) * factor.value


class Factor:
    """All of them look alike."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "a factor"


def test_an_eager_call_has_its_own_arguments(rng):
    x = rng.normal(size=(6, 3)).astype("float32")
    parallel = make_parallel(Scales(), 2)
    once, twice = (parallel(x, factor=Factor(value)) for value in (1.0, 2.0))
    assert difference(np.asarray(twice), 2 * np.asarray(once)) < 1e-6


@pytest.mark.filterwarnings("ignore:.*eagerly under a tape")
@pytest.mark.parametrize(
    "options", [{}, {"mode": "tower"}, {"mode": "model", "placement": {"two": 1}}], ids=str
)
@pytest.mark.parametrize("wrap", [lambda function: function, tf.function], ids=["eager", "graph"])
def test_a_stateless_call_uses_the_values_that_it_is_given(options, wrap, rng):
    x = rng.normal(size=(6, 3)).astype("float32")
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, name="one"), layers.Dense(2, name="two")]
    )
    results = []
    for one in (model, make_parallel(model, 2, **options)):
        values = [tf.constant(2 * np.asarray(v)) for v in one.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(values)
            call = wrap(lambda *given, one=one: one.stateless_call(list(given[:-1]), [], given[-1]))
            outputs, _ = call(*values, x)
        results.append([outputs, *tape.gradient(outputs, values)])
    assert difference(*results) < 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"mode": "tower"}, {"mode": "model", "placement": {"read": 1}}], ids=str
)
def test_call_as_a_function_of_its_own(options, rng):
    x = rng.integers(0, 9, size=(6, 5))
    embed = layers.Embedding(9, 4, mask_zero=True)
    model = keras.Sequential([keras.Input((5,)), embed, layers.LSTM(3, name="read")])
    parallel = make_parallel(model, 2, **options)
    call = tf.function(parallel.call)  # passes `training` and `mask` by position
    assert difference(call(tf.constant(x)), model(x)) < 1e-6


class PositionalOnly(keras.Model):
    def __init__(self):
        super().__init__()
        self.dropout, self.dense = layers.Dropout(0.5), layers.Dense(2)

    def call(self, inputs, /, training=None):
        return self.dense(self.dropout(inputs, training=training))


def test_a_call_with_arguments_by_position_only(rng):
    x = rng.normal(size=(6, 3)).astype("float32")
    model = PositionalOnly()
    assert difference(make_parallel(model, 2)(x), model(x)) < 1e-6
    assert difference(make_parallel(model, 2)(x, training=True), model(x)) > 1e-3
