"""Weights files between a parallel model on 4 devices, one on 2, and the plain model."""

import itertools

import h5py
import keras
import numpy as np
import pytest
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(8)

NAMES = ("plain", "two", "four")
case_names = ["dict_inputs_and_outputs", "subclassed_add_loss"]
some_cases = pytest.mark.parametrize("case", [c for c in CASES if c.name in case_names], ids=str)


def _three(case):
    plain, first, second = build_equal(case, 3)
    models = dict(zip(NAMES, (plain, make_parallel(first, 2), make_parallel(second, 4))))
    for model in models.values():
        compile_case(case, model, optimizer=keras.optimizers.Adam(0.01))
    return models


@some_cases
def test_every_direction_with_the_optimizer(case, rng, tmp_path):
    x, y = case.data(rng, 33)
    models = _three(case)
    for model in models.values():
        model.fit(x, y, shuffle=False, verbose=0)  # makes the optimizer's variables
    for number, (source, target) in enumerate(itertools.permutations(NAMES, 2)):
        path = tmp_path / f"{source}_{target}.weights.h5"
        models[source].fit(x, y, epochs=1 + number % 2, batch_size=20, verbose=0)  # moves away
        pair = [models[name] for name in (source, target)]
        assert difference(*map(variables, pair)) > 1e-4
        models[source].save_weights(path)
        models[target].load_weights(path)
        assert difference(*map(variables, pair)) == 0
        for model in pair:
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        assert difference(*map(variables, pair)) < 2e-5


@some_cases
def test_the_file_is_the_templates_own(case, rng, tmp_path):
    x, y = case.data(rng, 33)
    contents = {}
    for name, model in _three(case).items():
        model.fit(x, y, shuffle=False, verbose=0)
        path = tmp_path / f"{name}.weights.h5"
        model.save_weights(path)
        contents[name] = _read(path)
    assert any(key.startswith("optimizer") for key in contents["plain"])
    for name in ("two", "four"):
        assert contents[name].keys() == contents["plain"].keys()
        assert difference(contents[name], contents["plain"]) < 2e-5


def _read(path):
    contents = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                contents.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return contents


def test_the_templates_own_file_with_another_optimizer(rng, tmp_path):
    """What the template was compiled with is its own affair."""
    template = CASES[0].build()
    template.compile("adam", "mse")
    x, y = CASES[0].data(rng, 33)
    template.fit(x, y, verbose=0)
    parallel = make_parallel(template, 4)
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    parallel.save_weights(tmp_path / "parallel.weights.h5")
    keys = [key for key in _read(tmp_path / "parallel.weights.h5") if key.startswith("optimizer")]
    assert len(keys) == len(parallel.optimizer.variables)
    assert np.all([np.isfinite(weight).all() for weight in template.get_weights()])


def test_weights_loaded_by_the_template_after_the_first_prediction(rng, tmp_path):
    x, _ = CASES[0].data(rng, 9)
    other, template = CASES[0].build(), CASES[0].build()
    other.save_weights(tmp_path / "other.weights.h5")
    parallel = make_parallel(template, 4)
    before = parallel.predict(x, verbose=0)
    template.load_weights(tmp_path / "other.weights.h5")
    after = parallel.predict(x, verbose=0)
    assert difference(before, after) > 1e-3
    assert difference(after, other.predict(x, verbose=0)) < 2e-5


def test_a_plain_models_file_for_a_committee(tmp_path):
    template = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    path = str(tmp_path / "plain.weights.h5")
    template.save_weights(path)
    committee = make_parallel(template, 2, mode="tower", replicas="independent")
    with pytest.raises(
        ValueError, match=r"reads the weights of a committee(.|\n)*Give a plain model"
    ):
        committee.load_weights(path)
    for member in committee.replicas:
        member.load_weights(path)
    first, second = (member.get_weights() for member in committee.replicas)
    assert all(map(np.array_equal, first, second))


@pytest.mark.parametrize("options", [{}, {"mode": "model"}, {"mode": "tower"}], ids=str)
def test_weights_of_other_shapes_are_told_as_by_keras(options, tmp_path):
    def build(units):
        return keras.Sequential([keras.Input((6,)), *map(keras.layers.Dense, (units, 2))])

    build(5).save_weights(tmp_path / "other.weights.h5")
    parallel = make_parallel(build(8), 2, **options)
    text = r"variable.shape=\(6, 8\), Received: value.shape=\(6, 5\)"
    with pytest.raises(ValueError, match=text):
        parallel.load_weights(tmp_path / "other.weights.h5")
    with pytest.warns(UserWarning, match=text):
        parallel.load_weights(tmp_path / "other.weights.h5", skip_mismatch=True)
