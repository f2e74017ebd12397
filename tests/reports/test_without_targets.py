"""Reports of models that are trained without targets: their loss, or their step, is their own."""

import keras
import numpy as np
import pytest

from keras_multigpu import make_parallel, reports

_ON_JAX = keras.backend.backend() == "jax"
_ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")


def _make_penalized():
    """Its loss is a penalty of activations."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(3, activity_regularizer="l2")(keras.layers.Dense(4)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam())
    return model


class Adversarial(keras.Model):
    """Two networks, each with an optimizer, trained against each other."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        self.critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def call(self, inputs):
        return self.critic(inputs)

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data):
        import tensorflow as tf

        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        for sign, net, optimizer in (
            (1.0, self.critic, self.first),
            (-1.0, self.generator, self.second),
        ):
            with tf.GradientTape() as tape:
                made = self.generator(tf.ones((tf.shape(data)[0], 2)))
                loss = tf.reduce_mean(self(data)) - sign * tf.reduce_mean(self(made))
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def _make_adversarial():
    model = Adversarial()
    model(_ROWS)
    model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    return model


class Listed(Adversarial):
    """Its optimizers are in a list."""

    def compile(self, *optimizers):
        keras.Model.compile(self)
        self.both = [*optimizers]

    @property
    def first(self):
        return self.both[0]

    @property
    def second(self):
        return self.both[1]


def _make_listed():
    model = Listed()
    model(_ROWS)
    model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    return model


_of_tapes = pytest.mark.skipif(_ON_JAX, reason="a tape's step")


@pytest.mark.parametrize(
    "make",
    [
        _make_penalized,
        pytest.param(_make_adversarial, marks=_of_tapes),
        pytest.param(_make_listed, marks=_of_tapes),
    ],
)
@pytest.mark.parametrize("batch", [_ROWS, (_ROWS,)])
def test_transfers_and_memory_take_inputs_only(make, batch):
    model = make()
    before = model.get_weights()
    assert reports.transfers(make_parallel(model, 2), batch).training
    assert reports.memory(model, batch).bytes(kind="slots") > 0
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(new, old)


@pytest.mark.skipif(_ON_JAX, reason="a tape's step")
def test_times_are_those_of_its_own_step():
    model = _make_adversarial()
    before = model.get_weights()
    given = {"n_gpus": (1, 2), "batch_size": 8, "repeats": 1, "verbose": 0}
    assert [run.devices for run in reports.scaling(model, (_ROWS,), **given).runs] == [1, 2]
    advice = reports.advise(model, 8, n_gpus=(2,), modes=("data",), inputs=_ROWS, steps=1)
    assert advice.predictions
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(new, old)
    assert not model.first.built, "its slots would have the values of these steps"


@pytest.mark.skipif(_ON_JAX, reason="JAX has no texts")
def test_texts_are_given_as_they_are():
    texts = np.array(["a good film", "a bad one"] * 8, dtype=object)
    vectors = keras.layers.TextVectorization(max_tokens=9, output_sequence_length=3)
    vectors.adapt(texts)
    model = keras.Sequential([keras.Input((), dtype="string"), vectors])
    model.add(keras.layers.Embedding(9, 2))
    model.add(keras.layers.GlobalAveragePooling1D())
    model.compile("sgd", "mse")
    given = {"inputs": texts, "targets": np.zeros((16, 2)), "step_seconds": 0.01}
    assert reports.advise(model, 8, n_gpus=(2,), modes=("data",), **given).predictions
    assert reports.plan(model, 8, 2, memory="1 GB", **given).choices
    given = {
        "inputs": keras.ops.convert_to_tensor(texts),
        "targets": np.zeros((16, 2)),
        "steps": 1,
    }  # timed
    assert reports.plan(model, 8, 2, memory="1 GB", link="pcie4", **given).choices


class OfPairs(keras.Model):
    """Its step takes apart what `fit` gives to it: inputs and targets."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, *given):
        *state, (x, y) = given
        if _ON_JAX:
            return super().train_step(*state, (x, y))
        return super().train_step((x, y))


def test_the_batch_is_that_of_fit():
    model = OfPairs()
    model(_ROWS)
    model.compile("adam", "mse")
    pair = _ROWS, _ROWS
    assert reports.transfers(make_parallel(model, 2), pair).training
    assert reports.memory(model, pair).bytes(kind="slots") > 0
    given = {"inputs": _ROWS, "targets": _ROWS, "step_seconds": 0.01}
    assert reports.plan(model, 16, 2, memory="1 GB", **given).choices


def test_a_loss_of_targets_needs_them():
    model = _make_penalized()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with a loss"):
        reports.memory(model, _ROWS)
    with pytest.raises(ValueError, match=r"a tuple of inputs only. Give `\(x, y\)`"):
        reports.scaling(model, (_ROWS,), verbose=0)
