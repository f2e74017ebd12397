"""What is where: the batch, the state, the compiled step, and the weights afterwards."""

import re

import jax
import keras
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(4)


class Watched(keras.Model):
    """Notes where the arrays are that its steps are given, and how often it is traced."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.seen, self.traces = [], 0

    def call(self, inputs):
        self.traces += 1
        return self.dense(inputs)

    def train_step(self, state, data):
        if self.run_eagerly:
            self.seen.append((state, data))
        return super().train_step(state, data)


def _shard_shapes(array):
    return [shard.data.shape for shard in array.addressable_shards]


# No processor gets a single row.
@pytest.mark.parametrize(("rows", "shard"), [(8, 2), (4, 4), (6, 6), (3, 3), (1, 1)])
@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_each_device_is_given_its_slice(rows, shard, way):
    parallel = make_parallel(Watched(), 4)
    parallel.compile("sgd", "mse", run_eagerly=True)
    x, y = np.arange(3.0 * rows).reshape(rows, 3), np.zeros((rows, 2))
    if way == "fit":
        parallel.fit(x, y, sample_weight=np.ones(rows), shuffle=False, verbose=0)
    else:
        parallel.train_on_batch(x, y, np.ones(rows))
    state, data = parallel.template.seen[-1]
    for part in keras.tree.flatten(data):
        assert _shard_shapes(part) == 4 * [(shard, *part.shape[1:])]
        assert len(part.sharding.device_set) == 4
    assert np.array_equal(data[0], x)
    for value in keras.tree.flatten(state):
        assert _shard_shapes(value) == 4 * [value.shape]


def test_several_steps_in_one_execution():
    parallel = make_parallel(Watched(), 4)
    parallel.compile("sgd", "mse", run_eagerly=True, steps_per_execution=3)
    parallel.fit(np.zeros((44, 3)), np.zeros((44, 2)), batch_size=12, verbose=0)
    firsts = [_shard_shapes(data[0])[0] for _, data in parallel.template.seen]
    assert firsts == [(3, 3), (3, 3), (3, 3), (2, 3)]


def _compiled_step(parallel, x, y):
    """The text of the training step of a model that was trained already."""
    state = parallel._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    text = []

    def watch(state, iterator):
        data = next(iterator)
        text.append(jax.jit(parallel.train_step).lower(state, data).compile().as_text())
        return {}, state

    parallel._parallel_steps.placed(watch, "train_function")(state, iter([(x, y)]))
    return text[0]


def test_gradients_cross_once_and_activations_never():
    template = keras.Sequential(
        [keras.Input((30,)), layers.Dense(50, activation="tanh"), layers.Dense(20)]
    )
    parallel = make_parallel(template, 4)
    parallel.compile("adam", "mse")
    x, y = np.zeros((8, 30), "float32"), np.zeros((8, 20), "float32")
    parallel.fit(x, y, verbose=0)
    text = _compiled_step(parallel, x, y)
    found = re.findall(r"= (.*?) (all-[a-z]+|reduce-scatter|collective-permute)\(", text)
    assert {kind for _, kind in found} == {"all-reduce"}
    shapes = [shape for result, _ in found for shape in re.findall(r"f32\[([\d,]*)\]", result)]
    sizes = [int(np.prod([int(axis) for axis in shape.split(",") if axis])) for shape in shapes]
    weights = parallel.count_params()
    assert weights <= sum(sizes) < weights + 20  # and some numbers for the loss
    assert "f32[2,50]" in text  # each device's activations
    assert "f32[8,50]" not in text


def test_compiled_once_for_a_shape():
    x, y = np.zeros((70, 3)), np.zeros((70, 2))
    plain, template = Watched(), Watched()
    for model in (plain, template):
        model(x)
    parallel = make_parallel(template, 4)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    assert parallel.template.traces == plain.traces
    before = parallel.template.traces
    parallel.fit(x, y, batch_size=32, epochs=2, verbose=0)
    parallel.train_on_batch(x[:32], y[:32])
    assert parallel.template.traces == before + 1  # shapes are found out once a `fit`


def _build():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )


def test_random_numbers_and_batch_normalization_are_one_devices(rng):
    x, y = rng.normal(size=(70, 6)), rng.normal(size=(70, 2))
    plain, parallel = _build(), make_parallel(_build(), 4)
    histories = []
    for model in (plain, parallel):
        keras.utils.set_random_seed(4)
        model.compile("adam", "mse")
        histories.append(model.fit(x, y, batch_size=32, epochs=2, verbose=0).history)
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


def test_the_template_by_itself_and_on_other_devices_in_between(rng):
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))
    template, plain = _build(), _build()
    first = make_parallel(template, devices=["cpu:0", "cpu:1"])
    second = make_parallel(template, devices=["cpu:2", "cpu:3"])
    for model in (first, second, template):
        model.compile(keras.optimizers.SGD(0.05), "mse")
    plain.compile(keras.optimizers.SGD(0.05), "mse")
    for model in (first, template, second, template, first, second, template):
        for one in (model, plain):
            one.fit(x, y, shuffle=False, verbose=0)
            assert isinstance(template.weights[0].value.sharding, SingleDeviceSharding)
        for other in (first, second, template):
            outputs = [one.predict(x, verbose=0) for one in (other, plain)]
            assert difference(*outputs) < 2e-5
    assert difference(template.get_weights(), plain.get_weights()) < 2e-5


def test_single_batches_and_the_template_in_between(rng):
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))
    template, plain = _build(), _build()
    first = make_parallel(template, devices=["cpu:0", "cpu:1"])
    second = make_parallel(template, devices=["cpu:2", "cpu:3"])
    for model in (first, second, template, plain):
        model.compile(keras.optimizers.SGD(0.05), "mse")
    for model in (first, template, second, template, first, template):
        for one in (model, plain):
            one.train_on_batch(x, y)
    assert difference(template.get_weights(), plain.get_weights()) < 2e-5


def test_after_a_step_that_fails_the_template_is_as_keras_leaves_it(rng):
    parallel = make_parallel(_build(), 4)
    parallel.compile("sgd", "mse")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parallel.fit(np.zeros((8, 6)), np.zeros((8, 2)), verbose=0, callbacks=[Stop()])
    assert isinstance(parallel.weights[0].value.sharding, SingleDeviceSharding)
    parallel.fit(np.zeros((8, 6)), np.zeros((8, 2)), verbose=0)
