"""Models that were built on a batch, trained or not, and go on with several devices."""

import keras
import pytest
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel

WAYS = {
    "build": lambda model, x, y: model.build(x.shape),
    "call": lambda model, x, y: model(x[:2]),
    "fit": lambda model, x, y: model.fit(x, y, batch_size=10, shuffle=False, verbose=0),
    "predict": lambda model, x, y: model.predict(x, verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x[:8], y[:8]),
}
OPTIONS = {
    "data": {},
    "shard": {"shard": "weights"},
    "tower": {"mode": "tower"},
    "model": {"mode": "model", "n_gpus": 2},
}
CASES = [(way, mode) for way in WAYS for mode in OPTIONS if "data" in mode or way == "fit"]


def _data(rng):
    return rng.normal(size=(30, 6)).astype("float32"), rng.normal(size=(30, 1)).astype("float32")


def _made(way, data):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    WAYS[way](model, *data)
    assert model.inputs[0].shape[0] is not None
    return model


def _trained(model, x, y):
    model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    return [*variables(model), model.predict(x, batch_size=11, verbose=0)]


@pytest.mark.parametrize(("way", "mode"), CASES)
def test_goes_on_with_several_devices(way, mode, rng, tmp_path):
    data, path = _data(rng), tmp_path / "model.keras"
    template = _made(way, data)
    parallel = make_parallel(template, **{"n_gpus": 4, **OPTIONS[mode]})
    assert difference(_trained(_made(way, data), *data), _trained(parallel, *data)) < 1e-5
    parallel.save(path)
    loaded = keras.models.load_model(path)
    predicted = (model.predict(data[0], verbose=0) for model in (parallel, loaded))
    assert difference(*predicted) < 1e-6
    template.fit(*data, verbose=0)  # on one device again, with its own optimizer


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_goes_on_from_a_file(way, rng, tmp_path):
    data, path = _data(rng), tmp_path / "model.keras"
    _made(way, data).save(path)
    plain, parallel = keras.models.load_model(path), keras.models.load_model(path)
    parallel = make_parallel(parallel, 4)
    assert difference(_trained(plain, *data), _trained(parallel, *data)) < 1e-5


class Unbuilt(keras.Model):
    """Its layers, and so the optimizer's slots, are built by the first training step."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(48, "tanh"), keras.layers.Dense(2)

    def call(self, x):
        return self.head(self.hidden(x))


@pytest.mark.parametrize(
    "options",
    [{"mode": "model"}, {"shard": "optimizer"}, {"shard": "weights"}, {}, {"mode": "tower"}],
    ids=str,
)
def test_functions_of_several_sizes_of_batches_use_the_same_slots(options, rng):
    x, y = rng.normal(size=(12, 30)).astype("float32"), rng.normal(size=(12, 2)).astype("float32")
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = make_parallel(Unbuilt(), 3, **options) if is_parallel else Unbuilt()
        model.compile(keras.optimizers.RMSprop(0.01, momentum=0.5), "mse")
        logs = [model.train_on_batch(x[:n], y[:n]) for n in (6, 3, 6, 9, 3, 6)]
        variables = [*model.weights, *model.optimizer.variables]
        results.append([logs, *map(keras.ops.convert_to_numpy, variables)])
    assert difference(*results) < 1e-4


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.filterwarnings("ignore:.*are not compiled, and so each device computes all")
@pytest.mark.parametrize("options", [{"mode": "model"}, {"shard": "weights"}], ids=str)
def test_slots_that_move_when_the_first_evaluation_begins(options, rng):
    """An eager step has built them. `fit`, around the evaluation, goes on with a step function."""
    x, y = rng.normal(size=(12, 30)).astype("float32"), rng.normal(size=(12, 2)).astype("float32")
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = make_parallel(Unbuilt(), 3, **options) if is_parallel else Unbuilt()
        model.compile(keras.optimizers.RMSprop(0.01, use_ema=True), "mse", run_eagerly=True)
        model.fit(x, y, 4, epochs=2, shuffle=False, validation_data=(x, y), verbose=0)
        variables = [*model.weights, *model.optimizer.variables]
        results.append([*map(keras.ops.convert_to_numpy, variables)])
    assert difference(*results) < 1e-4
