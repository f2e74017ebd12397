"""Members of a committee begin apart, also where the model's code fixes seeds and weights."""

import contextlib
import itertools
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel

_X = np.linspace(-1, 1, 32, dtype="float32")[:, None]


def _dense(units, seed, **options):
    return layers.Dense(
        units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **options
    )


class Seeded(keras.Model):
    """Fixes its seeds, of which its configuration knows nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = _dense(16, 1), layers.Dropout(0.5, seed=3), _dense(2, 2)

    def call(self, inputs, training=False):
        return self.last(self.drop(self.first(inputs), training=training))


class Nested(keras.Model):
    """Makes layers in `build`, and passes one initializer to several of their parts."""

    def build(self, shape):
        init = keras.initializers.RandomNormal(seed=5)
        square = keras.initializers.Orthogonal(seed=6)
        rows = layers.LSTM(4, kernel_initializer=init, recurrent_initializer=init, seed=7)
        first = layers.Dense(6, kernel_initializer=square, bias_initializer=init)
        self.inner = keras.Sequential([first, layers.Reshape((3, 2)), rows])
        self.inner.build(shape)
        self.norm, self.noise = layers.BatchNormalization(), layers.GaussianNoise(0.5, seed=11)
        self.norm.build((None, 4))

    def call(self, inputs, training=False):
        return self.noise(self.norm(self.inner(inputs)), training=training)


def _committee(template, n=3):
    return make_parallel(template, n, mode="tower", replicas="independent")


def _random(model):
    """The kernels, which an initializer has drawn."""
    return [one.numpy() for one in model.trainable_variables if "kernel" in one.name]


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [Seeded, Nested])
@pytest.mark.parametrize("begin", ["unbuilt", "built", "trained"])
def test_fixed_seeds_differ_by_member(make, begin):
    template, y = make(), np.zeros((32, 2 if make is Seeded else 4))
    if begin != "unbuilt":
        template(_X)
    if begin == "trained":
        template.compile("sgd", "mse")
        template.fit(_X, y, verbose=0)
    before = template.get_weights()
    parallel = _committee(template)
    parallel.predict(_X, verbose=0)
    if begin != "unbuilt":
        assert difference(template.get_weights(), before) == 0
    for one, other in itertools.combinations(parallel.replicas, 2):
        assert len(_random(one)) == (2 if make is Seeded else 3)
        for pair in zip(_random(one), _random(other)):
            assert np.abs(np.subtract(*pair)).max() > 0.01
    drawn = parallel.predict_replicas(_X, training=True, verbose=0)
    calm = parallel.predict_replicas(_X, verbose=0)
    noise = [np.sign(one - other) for one, other in zip(drawn, calm)]
    for one, other in itertools.combinations(noise, 2):
        assert (one != other).any()
    parallel.compile("sgd", "mse")
    parallel.fit(_X, y, verbose=0)
    assert parallel.disagreement(_X, verbose=0).max() > 1e-3


def test_the_same_members_each_time():
    committees = [_committee(template) for template in (Seeded(), Seeded())]
    outputs = [one.predict_replicas(_X, verbose=0) for one in committees]
    assert difference(*outputs) == 0
    drawn = [one.predict_replicas(_X, training=True, verbose=0) for one in committees]
    assert difference(*drawn) == 0


def test_masks_of_members_with_equal_weights():
    """Of one input and no bias: each output shows whether its unit was dropped."""
    parallel = _committee(Seeded())
    parallel.predict(_X, verbose=0)
    states = [model.drop.seed_generator.state.numpy() for model in parallel.replicas]
    assert len({int(state[0]) for state in states}) == 3


def fixed_numbers(shape, dtype=None):
    values = np.random.default_rng(0).normal(size=shape)
    return keras.ops.convert_to_tensor(values, dtype or "float32")


class Unnamed(layers.Layer):
    """Keeps no initializer as an attribute."""

    def build(self, shape):
        seeded = keras.initializers.GlorotUniform(seed=1)
        self.kernel = self.add_weight(shape=(shape[-1], 3), initializer=seeded)

    def call(self, inputs):
        return inputs @ self.kernel


class Partly(keras.Model):
    """Begins with a layer whose weights are the same each time."""

    def __init__(self):
        super().__init__()
        self.fixed, self.free = self.make(), layers.Dense(1)

    def make(self):
        return layers.Dense(3, kernel_initializer=fixed_numbers, name="from_numbers")

    def call(self, inputs):
        return self.free(self.fixed(inputs))


class PartlyUnnamed(Partly):
    """Makes them by an initializer that no attribute has."""

    def make(self):
        return Unnamed(name="from_a_seed")


@pytest.mark.parametrize(
    ("make", "name"), [(Partly, "from_numbers"), (PartlyUnnamed, "from_a_seed")]
)
def test_weights_that_stay_equal_are_told_once(make, name, tmp_path):
    y = np.sin(3 * _X)
    parallel = _committee(make())
    parallel.compile("sgd", "mse")
    text = f"Received: 3 members with equal weights in '{name}': an initializer in the model's code"
    with pytest.warns(UserWarning, match=text) as said:
        parallel.fit(_X, y, verbose=0)
    assert [one.category for one in said].count(UserWarning) == 1
    parallel.fit(_X, y, verbose=0)  # and no second time
    other = _committee(make())
    other.compile("sgd", "mse")
    other(_X)
    for model in other.replicas[1:]:
        model.set_weights(
            [2 * np.random.default_rng(id(model)).normal(size=w.shape) for w in model.get_weights()]
        )
    other.fit(_X, y, verbose=0)


def test_many_equal_layers_are_counted():
    @keras.saving.register_keras_serializable("test_members")
    def numbers(shape, dtype=None):
        return fixed_numbers(shape, dtype)

    template = keras.Sequential([keras.Input((1,))])
    for number in range(5):
        template.add(layers.Dense(3, kernel_initializer=numbers, name=f"layer{number}"))
    parallel = _committee(template, 2)
    parallel.compile("sgd", "mse")
    text = "2 members with equal weights in 'layer0', 'layer1', 'layer2' and 2 more: an initial"
    with pytest.warns(UserWarning, match=text):
        parallel.train_on_batch(_X, np.zeros((32, 3)))


def test_what_is_equal_by_design_is_not_told():
    """Zeros, ones, identities, biases of forget gates; and a single replica."""
    make = lambda: keras.Sequential(  # noqa: E731
        [
            keras.Input((1,)),
            layers.Dense(4, use_bias=True),
            layers.Reshape((2, 2)),
            layers.LSTM(3, recurrent_initializer="identity"),
            layers.LayerNormalization(),
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 2):
            parallel = _committee(make(), n)
            parallel.compile("sgd", "mse")
            parallel.fit(_X, np.zeros((32, 3)), verbose=0)


class Bent(layers.Layer):
    """Has settings that may change during a training."""

    def __init__(self, power=1.0, **kwargs):
        super().__init__(**kwargs)
        self.power, self.bounds, self.shape = power, [0.0, 9.0], keras.ops.abs

    def get_config(self):
        return {**super().get_config(), "power": self.power}

    def call(self, inputs):
        return keras.ops.clip(self.shape(inputs) ** self.power, *self.bounds)


def test_settings_that_change_on_the_template_change_in_all_members():
    template = keras.Sequential([keras.Input((1,)), Bent(), layers.Dense(1)])
    committee = make_parallel(template, 2, mode="tower", replicas="independent")
    committee.predict_replicas(_X, verbose=0)
    template.layers[0].power, template.layers[0].bounds[1] = 3.0, 0.1
    template.layers[0].shape = lambda x: keras.ops.abs(x) / 2
    committee.compile()
    found = committee.predict_replicas(_X, verbose=0)
    bent = np.clip(np.abs(_X / 2) ** 3, 0, 0.1)
    for member, outputs in zip(committee.replicas, found):
        kernel, bias = member.get_weights()
        assert difference(bent @ kernel + bias, outputs) < 1e-6


def test_members_of_constants_only_are_told():
    y = np.zeros((len(_X), 1))
    for initializer, is_told in (("zeros", True), ("glorot_uniform", False)):
        template = keras.Sequential(
            [keras.Input((1,)), layers.Dense(1, kernel_initializer=initializer, name="only")]
        )
        parallel = _committee(template, 2)
        parallel.compile("sgd", "mse")
        told = pytest.warns(UserWarning, match="2 members with equal weights in 'only': an init")
        with told if is_told else contextlib.nullcontext():
            parallel.fit(_X, y, verbose=0)
