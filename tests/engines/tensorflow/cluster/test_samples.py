"""Samples of the state: what of a difference they show, and what they cost."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.samples import EVERY, Samples, alike


def build(optimizer="sgd"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(1000, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3, dtype="bfloat16"),
            keras.layers.BatchNormalization(),
        ]
    )
    model.compile(optimizer)
    model.optimizer.build(model.trainable_variables)
    return model


def taken(model, come=EVERY):
    """The samples in a step."""
    samples = Samples(model)
    take = functools.partial(samples.take, tf.constant(come, tf.int64), EVERY)
    found = tf.function(take)().numpy()
    np.testing.assert_allclose(found, take(), rtol=1e-12)  # eagerly
    return found


def first_other(*found):
    """The number of the first sample that is not that of process 0, by process."""
    bits = tf.stack([tf.bitcast(tf.reshape(one, [-1]), tf.int64) for one in found])
    return alike(bits).numpy().tolist()


def test_models_without_a_sample():
    assert first_other(*[np.zeros([0, 2])] * 3) == [0, 0, 0]


def _shift(weight, size=0.05):
    return lambda model: model.weights[weight].assign(model.weights[weight] + size)


def _set_one(model):
    table = model.weights[0].numpy()
    table[999, 3] += 1.0
    model.weights[0].assign(table)


CHANGES = {
    "table": (_shift(0), 0),
    "bfloat16": (_shift(1), 2),
    "bias": (_shift(2, 1e-6), 4),  # of zeros
    "statistics": (_shift(6), 12),
    "not a number": (_shift(1, np.nan), 2),
    "infinite": (_shift(3, np.inf), 6),
    "counter": (lambda model: model.optimizer.iterations.assign(3), 15),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    one, other = build(), build()
    assert first_other(taken(one), taken(other)) == [0, 0]
    act, expected = CHANGES[change]
    act(other)
    assert first_other(taken(one), taken(other), taken(one)) == [0, expected + 1, 0]
    assert first_other(taken(other), taken(other)) == [0, 0]


@pytest.mark.parametrize("rate", [0.1001, keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9)])
def test_another_rate_is_seen_in_each_step(rate):
    one, other = build(keras.optimizers.SGD(0.1)), build(keras.optimizers.SGD(rate))
    if not isinstance(rate, float):
        assert first_other(taken(one, 1), taken(other, 1)) == [0, 0]  # until it decays
        for model in (one, other):
            model.optimizer.iterations.assign(2)
    assert first_other(taken(one, 1), taken(other, 1)) == [0, 2 * len(one.weights) + 1]
    assert Samples(one).describe(2 * len(one.weights)) == "learning_rate=0.1"


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this version of Keras has none"
)
def test_the_rate_of_each_of_several_optimizers_is_seen():
    found = []
    for rate in (0.1, 0.2):
        of_table, of_others = keras.optimizers.SGD(0.1), keras.optimizers.SGD(rate)

        def choose(variable, table=of_table, others=of_others):
            return table if "embedding" in variable.path else others

        found.append(taken(build(keras.optimizers.MultiOptimizer(choose)), 1))
    assert first_other(*found)[1]


def test_rounding_is_no_difference():
    one, other = build(), build()
    rng = np.random.default_rng(0)
    for weight in other.weights[:1]:
        noise = 1 + 1e-6 * rng.normal(size=weight.shape)
        weight.assign(weight.numpy() * noise.astype("float32"))
    assert first_other(taken(one), taken(other)) == [0, 0]


def test_weights_are_sampled_in_some_steps_and_in_turn_all_of_them():
    one, other = build(), build()
    _set_one(other)
    seen = [any(first_other(taken(one, k), taken(other, k))) for k in range(1, 2 * EVERY)]
    assert not any(seen)
    rows = 1000 // (256 // 4)
    turns = range(1, rows + 2)
    assert any(any(first_other(taken(one, k * EVERY), taken(other, k * EVERY))) for k in turns)


def test_what_a_number_is_is_told():
    model = build()
    text = Samples(model).describe(0)
    assert text.startswith("sequential")
    assert f"with a sum of {model.weights[0].numpy().sum():.3g}"[:20] in text
    assert (
        Samples(model).describe(2 * len(model.weights) + 1)
        == f"{model.optimizer.iterations.path}=0"
    )


def test_a_state_of_random_numbers_is_sampled_whole_in_each_step():
    def dropout():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5, seed=2**31)])
        model.compile("sgd")
        model.optimizer.build([])
        return model

    one, other = dropout(), dropout()
    assert first_other(taken(one, 1), taken(other, 1)) == [0, 0]
    (state,) = other.variables
    state.assign([2**31, 1])
    place = len(taken(one, 1)) - 1
    assert first_other(taken(one, 1), taken(other, 1)) == [0, place + 1]
    assert Samples(other).describe(place).endswith("=[2147483648, 1]")


def test_the_state_of_a_recurrent_layer_is_sampled_in_each_step():
    """It is none of the model's variables, and a step writes over it."""
    layer = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(4, 2, 1)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((4, 2, 1)), np.ones((4, 1)))
    samples = Samples(model)
    before = samples.take(tf.constant(1, tf.int64), EVERY).numpy()
    layer.reset_states()
    after = samples.take(tf.constant(1, tf.int64), EVERY).numpy()
    changed = [k for k in range(len(before)) if abs(before[k, 0] - after[k, 0]) > before[k, 1]]
    assert {samples.describe(k) for k in changed} == {f"{layer.states[0].path} with a sum of 0"}


def test_a_step_that_does_not_train_samples_all_weights():
    one, other = build(), build()
    other.weights[1].assign(other.weights[1] + 0.1)
    come = tf.constant(1, tf.int64)
    found = [Samples(model).take(come, 1).numpy() for model in (one, other)]
    assert first_other(*found) == [0, 3]
    assert first_other(taken(one, 1), taken(other, 1)) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        ("int32", [5000], [5001]),
        ("int64", [2**60, 2, 2], [2**60, 3, 1]),
        ("uint8", [250, 7], [250, 8]),
        ("bool", [True, False], [False, True]),
        ("float64", [np.nan, 1.0], [np.nan, 5.0]),
        ("float64", [np.nan, np.inf], [np.inf, np.nan]),
        ("float64", [np.inf, 0.0], [-np.inf, 0.0]),
        ("float32", [np.inf, 0.1], [np.inf, 0.2]),
        ("float32", [1e17, 1.0], [1e17, 5.0]),
        ("float64", [1e308, 1.0], [1e308, 5.0]),
    ],
)
def test_no_element_hides_another_in_what_is_not_trained(dtype, first, second):
    models = []
    for values in (first, second):
        layer = keras.layers.Flatten()
        shape = (len(values),)
        state = layer.add_weight(shape=shape, dtype=dtype, trainable=False, initializer="zeros")
        state.assign(np.array(values, dtype))
        models.append(keras.Sequential([keras.Input((2,)), layer]))
    one, other = models
    assert any(first_other(taken(one, 1), taken(other, 1)))
    assert not any(first_other(taken(one, 1), taken(one, 1)))


@pytest.mark.parametrize(("dtype", "is_seen"), [("float64", True), ("float32", False)])
def test_what_is_rounding_depends_on_the_type(dtype, is_seen):
    layers = [keras.Input((3,), dtype=dtype), keras.layers.Dense(2, dtype=dtype)]
    one, other = (
        keras.Sequential(layers),
        keras.Sequential([layers[0], keras.layers.Dense(2, dtype=dtype)]),
    )
    other.set_weights(one.get_weights())
    other.weights[0].assign(other.weights[0] * (1 + 1e-5))
    assert any(first_other(taken(one), taken(other))) == is_seen


def test_a_model_without_an_optimizer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert taken(model).shape == (4, 2)
    empty = keras.Sequential([keras.Input((2,)), keras.layers.Flatten()])
    assert taken(empty).shape == (0, 2)


def test_a_table_is_not_read_as_a_whole():
    """After a sparse update TensorFlow would copy it."""
    samples = Samples(build())
    take = functools.partial(samples.take, tf.constant(EVERY, tf.int64), EVERY)
    graph = tf.function(take).get_concrete_function()
    branches = graph.graph.as_graph_def().library.function
    names = [node.op for branch in branches for node in branch.node_def]
    assert names.count("ResourceGather") == 1
    # What is not trained is sampled in every step, outside of the branch.
    assert names.count("ReadVariableOp") == len(samples._model.trainable_weights) - 1
