"""`evaluate` and `predict` send each weight once, and bring home only what they changed."""

import gc
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.engines.jax.joint_placement import placement_on

_KERNEL = (37, 41)
_X, _Y = np.linspace(0, 1, 8 * 37).reshape(8, 37), np.zeros((8, 3))
_CALLS = {
    "evaluate": lambda model: model.evaluate(_X, _Y, batch_size=4, verbose=0),
    "predict": lambda model: model.predict(_X, batch_size=4, verbose=0),
    "test_on_batch": lambda model: model.test_on_batch(_X, _Y),
    "predict_on_batch": lambda model: model.predict_on_batch(_X),
}


class Draws(layers.Layer):
    """Draws random numbers and counts its calls, also in predictions."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)


class Target(layers.Layer):
    """Copies one weight to others in each call, of which a target network is made."""

    def build(self, shape):
        self.online = self.add_weight(shape=(37, 37), name="online")
        self.targets = [
            self.add_weight(shape=(37, 37), name=f"target{number}", trainable=False)
            for number in range(3)
        ]

    def call(self, inputs):
        outputs = sum(inputs @ target for target in self.targets) + inputs @ self.online
        half = self.online / 2
        for target, value in zip(self.targets, (self.online, half, half)):
            target.assign(value)
        return outputs


class Swaps(keras.Sequential):
    """Swaps two of its weights in each evaluation step."""

    def test_step(self, state, data):
        logs, (trained, others, metrics) = super().test_step(state, data)
        return logs, ([trained[2], trained[1], trained[0], *trained[3:]], others, metrics)


class OwnFunction(keras.Sequential):
    """Makes its prediction step itself."""

    def make_predict_function(self, force=False):
        @jax.jit
        def step(state, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            outputs, others = self.stateless_call(*state, x)
            return outputs, (state[0], others)

        self.predict_function = lambda state, iterator: step(state, next(iterator))


def _state(model):
    return [np.asarray(variable) for variable in model.variables]


def _layers():
    return [keras.Input((37,)), layers.Dense(41), layers.BatchNormalization(), layers.Dense(3)]


def _pair(make=lambda: keras.Sequential(_layers()), **settings):
    """A model, an equal one, and its parallel model; all compiled."""
    plain, template = make(), make()
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, 4)
    for model in (plain, template, parallel):
        model.compile(keras.optimizers.SGD(0.01), "mse", **settings)
    return plain, template, parallel


@pytest.fixture
def sent(monkeypatch):
    """The shapes of all arrays that are put on devices."""
    shapes, put = [], jax.device_put

    def note(value, *args, **kwargs):
        shapes.extend(map(np.shape, jax.tree.leaves(value)))
        return put(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", note)
    return shapes


@pytest.mark.parametrize("name", _CALLS)
def test_weights_are_sent_once_and_stay_the_same_arrays(name, sent):
    _, template, parallel = _pair()
    before = [variable.value for variable in template.variables]
    _CALLS[name](parallel)
    assert sent.count(_KERNEL) == 1
    for again in (name, "evaluate", "predict"):
        sent.clear()
        _CALLS[again](parallel)
        assert not {_KERNEL, (41,), (41, 3)} & set(sent)
    assert all(variable.value is value for variable, value in zip(template.variables, before))


def test_a_training_takes_over_what_was_sent(sent):
    plain, _, parallel = _pair()
    parallel.predict(_X, verbose=0)
    sent.clear()
    for model in (plain, parallel):
        model.fit(_X, _Y, batch_size=4, shuffle=False, verbose=0, validation_data=(_X, _Y))
    assert sent.count(_KERNEL) == 1  # the way home
    assert difference(_state(plain), _state(parallel)) < 2e-5


@pytest.mark.parametrize("settings", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_state_that_a_call_changes_comes_home(settings, sent):
    plain, template, parallel = _pair(lambda: keras.Sequential([*_layers(), Draws()]), **settings)
    kernel = template.layers[0].kernel.value
    for name in ("predict", "evaluate", "evaluate", "predict"):
        assert difference(*(_CALLS[name](model) for model in (plain, parallel))) < 2e-5
        assert difference(_state(plain), _state(template)) < 2e-5
        assert not any(variable.value.committed for variable in template.variables)
    assert float(template.layers[-1].calls.value) == 4 * 2  # batches
    # Several batches in one step are left to Keras.
    assert (template.layers[0].kernel.value is kernel) == ("steps_per_execution" not in settings)


def test_what_is_set_in_between_is_seen():
    plain, template, parallel = _pair()
    for scale in (1.0, 2.0, 3.0):
        for model in (plain, template):
            model.set_weights([scale * weight for weight in model.get_weights()])
        assert difference(*(model.predict(_X, verbose=0) for model in (plain, parallel))) < 2e-5


def test_the_template_and_its_parallel_model_take_turns():
    plain, template, parallel = _pair()
    for model in (parallel, template, parallel, parallel, template):
        for call in _CALLS.values():
            assert difference(*(call(one) for one in (plain, model))) < 2e-5
        for one in (plain, model):
            one.fit(_X, _Y, batch_size=4, shuffle=False, verbose=0)
        assert difference(_state(plain), _state(template)) < 2e-5


@pytest.mark.parametrize("make", [Swaps, OwnFunction])
def test_steps_of_the_users_own(make):
    plain, _, parallel = _pair(lambda: make([keras.Input((37,)), *map(layers.Dense, (37, 37, 3))]))
    for name in ("evaluate", "predict", "predict", "evaluate"):
        assert difference(*(_CALLS[name](model) for model in (plain, parallel))) < 2e-5
        assert difference(_state(plain), _state(parallel)) < 2e-5


def test_weights_that_have_the_same_array():
    plain, template, parallel = _pair(
        lambda: keras.Sequential([keras.Input((37,)), layers.Dense(37), layers.Dense(37)])
    )
    first, second = (layer.kernel for layer in template.layers)
    second.assign(first.value)
    plain.set_weights(template.get_weights())
    y = np.zeros((8, 37))
    for model in (plain, parallel):
        model.predict(_X, verbose=0)
        model.fit(_X, y, batch_size=4, shuffle=False, verbose=0)
    assert difference(_state(plain), _state(parallel)) < 2e-5


@pytest.mark.parametrize("settings", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
@pytest.mark.parametrize("name", _CALLS)
def test_a_step_that_copies_a_weight_leaves_no_two_with_one_array(name, settings):
    make = lambda: keras.Sequential([keras.Input((37,)), Target(), layers.Dense(3)])  # noqa: E731
    plain, template, parallel = _pair(make, **settings)
    for model in (plain, parallel):
        for _ in range(2):
            _CALLS[name](model)
    shards = [variable.value.addressable_shards[0].data for variable in template.variables]
    assert len({shard.unsafe_buffer_pointer() for shard in shards}) == len(shards)
    plain.set_weights(plain.get_weights())  # its eager steps leave some with one array
    for model in (plain, template):  # which donates each array to XLA, once
        model.compile("sgd", "mse")
        model.fit(_X, _Y, batch_size=4, shuffle=False, verbose=0)
    assert difference(_state(plain), _state(template)) < 2e-5


class Latest(keras.metrics.Metric):
    """The latest value of a weight."""

    def __init__(self):
        super().__init__(name="latest")
        self.kept = self.add_weight(shape=_KERNEL, initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(self.of.value)

    def result(self):
        return keras.ops.sum(self.kept)


def test_a_metric_that_keeps_a_weight():
    """Plain Keras fails: it donates the array that the two then share twice."""
    _, template, parallel = _pair()
    latest = Latest()
    latest.of = template.layers[0].kernel
    parallel.compile("sgd", "mse", metrics=[latest])
    for _ in range(2):
        logs = parallel.evaluate(_X, _Y, batch_size=2, verbose=0, return_dict=True)
        assert difference(logs["latest"], np.sum(template.layers[0].kernel)) < 1e-4


def test_copies_end_with_the_model():
    _, template, parallel = _pair()
    parallel.predict(_X, verbose=0)
    copies, value = placement_on(parallel.devices).copies, template.layers[0].kernel.value
    ended = weakref.ref(copies.of(value))
    del parallel
    gc.collect()
    assert ended() is None


def test_copies_share_the_first_devices_memory_and_end_with_the_weights():
    _, template, parallel = _pair()
    parallel.predict(_X, verbose=0)
    value = template.layers[0].kernel.value
    copy = placement_on(parallel.devices).copies.of(value)
    shards = {shard.device: shard.data for shard in copy.addressable_shards}
    (first,) = value.devices()
    assert len(shards) == 4
    assert shards.pop(first).unsafe_buffer_pointer() == value.unsafe_buffer_pointer()
    ended = weakref.ref(copy)
    del copy, shards
    gc.collect()
    assert ended() is not None
    template.set_weights(template.get_weights())
    del value
    gc.collect()
    assert ended() is None
