"""A `compute_loss` of the template's own that reads `self`: each member's, as if trained alone."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel

COUNT, EPOCHS = 4, 5


@pytest.fixture(autouse=True)
def _double_precision():
    with all_in_double_precision():
        yield


class Model(keras.Model):
    """Has a scale, a center that no gradient trains, penalties and layers."""

    def __init__(self):
        super().__init__()
        penalty = keras.regularizers.L2(0.1)
        self.body = layers.Dense(4, activation="tanh", kernel_regularizer=penalty)
        self.head = layers.Dense(2, activity_regularizer=keras.regularizers.L2(0.05))
        self.drop = layers.Dropout(0.5, seed=5)
        draw = keras.initializers.RandomUniform(0.5, 2.0)
        self.scale = self.add_weight(shape=(), initializer=draw, name="scale")
        self.center = self.add_weight(shape=(2,), trainable=False, name="center")
        self.held = {"scale": self.scale}
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        return self.head(self.body(inputs))

    def get_config(self):
        return {}


def _loss(name):
    """A class whose `compute_loss` is one of the functions below."""

    def register(function):
        class Own(Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                def plain(y_pred):
                    return Model.compute_loss(self, x, y, y_pred, sample_weight, training)

                return function(self, plain, x, y, y_pred, training)

        LOSSES[name] = Own
        return function

    return register


LOSSES = {}


@_loss("a weight")
def _scaled(self, plain, x, y, y_pred, training):
    return plain(y_pred / self.scale)


@_loss("a weight in a dictionary")
def _held(self, plain, x, y, y_pred, training):
    return plain(y_pred / self.held["scale"])


@_loss("a layer")
def _body(self, plain, x, y, y_pred, training):
    return plain(y_pred) + ops.mean(self.body(x) ** 2) + 0 * self.scale


@_loss("the model")
def _called(self, plain, x, y, y_pred, training):
    return plain(y_pred) * self.scale + ops.mean((self(1.1 * x, training=False) - y_pred) ** 2)


@_loss("losses")
def _losses(self, plain, x, y, y_pred, training):
    return ops.mean((y - y_pred) ** 2) * (self.scale + sum(self.losses))


@_loss("all weights")
def _weights(self, plain, x, y, y_pred, training):
    return plain(y_pred) * sum(ops.sum(one**2) for one in self.trainable_weights)


@_loss("a weight that it assigns")
def _assigned(self, plain, x, y, y_pred, training):
    if training:
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(y_pred, axis=0))
    return plain(self.scale * y_pred - self.center)


@_loss("random numbers")
def _drawn(self, plain, x, y, y_pred, training):
    return plain(self.scale * self.drop(y_pred, training=training))


@_loss("a metric")
def _metric(self, plain, x, y, y_pred, training):
    self.seen.update_state(self.scale)
    return plain(y_pred / self.scale)


def _data(rng):
    return rng.normal(size=(20, 5)), rng.normal(size=(20, 2))


def _train(model, data, **settings):
    model.compile(keras.optimizers.Adam(0.02), "mse", **settings)
    # One batch: Keras on TensorFlow may hand out several in another order.
    logs = model.fit(*data, batch_size=20, epochs=EPOCHS, shuffle=False, verbose=0).history
    return logs, model.evaluate(*data, return_dict=True, verbose=0)


def _trained_together_and_alone(template, data, **settings):
    """The committee, its logs, and each member with its logs when trained alone."""
    template(data[0])
    options = {"mode": "tower", "replicas": "independent", "num_replicas": COUNT}
    committee = make_parallel(template, 2, loss_of="replicas", **options)
    alone = []
    for member in committee.replicas:
        model = type(template)()
        model(data[0])
        for one, other in zip(model.variables, member.variables):
            one.assign(ops.convert_to_numpy(other.value))
        alone.append(model)
    logs = _train(committee, data, **settings)
    return committee, logs, [(model, _train(model, data, **settings)) for model in alone]


def _check(committee, logs, alone):
    for member, (model, _) in zip(committee.replicas, alone):
        for one, other in zip(member.get_weights(), model.get_weights()):
            np.testing.assert_allclose(one, other, atol=1e-12)
    means = np.mean([one["loss"] for _, (one, _) in alone], axis=0)
    np.testing.assert_allclose(logs[0]["loss"], means, rtol=1e-9)
    mean = np.mean([one["loss"] for _, (_, one) in alone])
    np.testing.assert_allclose(logs[1]["loss"], mean, rtol=1e-9)


CALLS_LAYERS = "ignore:Own calls layers directly:UserWarning"


@pytest.mark.filterwarnings(CALLS_LAYERS)
@pytest.mark.thin(3)
@pytest.mark.parametrize("name", LOSSES)
def test_members_are_as_if_trained_alone(name, rng):
    committee, logs, alone = _trained_together_and_alone(LOSSES[name](), _data(rng))
    _check(committee, logs, alone)
    assert len({float(one.scale.value) for one in committee.replicas}) == COUNT


@pytest.mark.thin(2)
@pytest.mark.parametrize("settings", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_with_other_settings(settings, rng):
    template = LOSSES["a weight that it assigns"]()
    _check(*_trained_together_and_alone(template, _data(rng), **settings))


def test_a_metric_sees_all_members(rng):
    _, logs, alone = _trained_together_and_alone(LOSSES["a metric"](), _data(rng))
    means = np.mean([one["seen"] for _, (_, one) in alone])
    np.testing.assert_allclose(logs[1]["seen"], means, rtol=1e-9)


@pytest.mark.filterwarnings(CALLS_LAYERS)
def test_reporting_the_mix_changes_no_state(rng):
    """The loss of the mix is computed too, and would draw and assign."""
    committee, logs, alone = _trained_together_and_alone(LOSSES["random numbers"](), _data(rng))
    seeds = [
        [np.asarray(one.drop.seed_generator.state.value) for one in models]
        for models in (committee.replicas, [model for model, _ in alone])
    ]
    np.testing.assert_array_equal(*seeds)
    assert np.isfinite(logs[1]["mix_loss"])


def test_the_mixs_loss_is_that_of_all_members(rng):
    x, y = _data(rng)
    committee, (_, logs), _ = _trained_together_and_alone(LOSSES["a weight"](), (x, y))
    mix = committee.predict(x, verbose=0)
    losses = [
        np.mean((mix / float(one.scale.value) - y) ** 2) + sum(map(float, _penalties(one, x)))
        for one in committee.replicas
    ]
    assert logs["mix_loss"] == pytest.approx(np.mean(losses), 1e-6)  # a metric: float32


def _penalties(model, x):
    model(x)
    return model.losses


def test_a_function_that_is_set_on_the_template(rng):
    """It reads the template's weight by name; each member's value is there."""
    template, data = Model(), _data(rng)
    template(data[0])

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred / template.scale) ** 2)

    template.compute_loss = compute_loss
    options = {"mode": "tower", "replicas": "independent", "num_replicas": COUNT}
    committee = make_parallel(template, 2, loss_of="replicas", **options)
    before = [float(one.scale.value) for one in committee.replicas]
    _train(committee, data)
    changes = {float(one.scale.value) - old for one, old in zip(committee.replicas, before)}
    assert len(changes) == COUNT
    assert 0 not in changes


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
def test_the_mixs_own_loss_trains_what_it_reads(rng):
    """With `loss_of='mix'` it reads the template's weight."""
    template, data = LOSSES["a weight"](), _data(rng)
    template(data[0])
    options = {"mode": "tower", "replicas": "independent", "num_replicas": COUNT}
    committee = make_parallel(template, 2, loss_of="mix", **options)
    before = [float(one.scale.value) for one in committee.replicas]
    committee.compile("sgd", "mse")
    committee.fit(*data, verbose=0)
    after = [float(one.scale.value) for one in committee.replicas]
    assert after[0] != before[0]
    assert after[1:] == before[1:]


class OwnStep(Model):
    def train_step(self, *args):
        return self.helped(*args)

    def helped(self, *args):
        return super().train_step(*args), self.scale


def test_a_step_that_reads_weights_is_refused(rng):
    template = OwnStep()
    template(_data(rng)[0])
    options = {"mode": "tower", "replicas": "independent", "num_replicas": COUNT}
    committee = make_parallel(template, 2, loss_of="replicas", **options)
    with pytest.raises(ValueError, match="`train_step` of OwnStep, which reads `self.scale`: the"):
        committee.compile("sgd", "mse")
    committee.loss_of = "mix"
    committee.compile("sgd", "mse")
