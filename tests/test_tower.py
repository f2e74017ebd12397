"""Tower mode: replicas that see the whole batch, mixed into one prediction."""

import keras
import numpy as np
import pytest
from cases import CASES, build_equal, compile_case
from keras import layers, ops
from parity import difference, take, variables

import keras_multigpu
from keras_multigpu import make_parallel

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_shared_replicas_train_like_one_device(case, rng, tmp_path):
    x, y = case.data(rng, 70)
    plain, template = build_equal(case)
    parallel = make_parallel(template, 3, mode="tower")
    histories = []
    for model in (plain, parallel):
        compile_case(case, model)
        keras.utils.set_random_seed(3)
        histories.append(model.fit(x, y, 32, 2, shuffle=False, verbose=0).history)
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    outputs = [model.predict(take(x, 5), verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < case.tolerance
    parallel.save_weights(tmp_path / "tower.weights.h5")
    plain.load_weights(tmp_path / "tower.weights.h5")
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


@every_case
def test_independent_replicas_of_every_case(case, rng, tmp_path):
    x, y = case.data(rng, 37)
    (template,) = build_equal(case, 1)
    parallel = make_parallel(template, 2, mode="tower", replicas="independent")
    compile_case(case, parallel)
    parallel.fit(x, y, 32, 2, verbose=0)
    first, second = parallel.replicas
    assert first is template
    assert len(first.weights) == len(second.weights)
    assert not set(map(id, first.weights)) & set(map(id, second.weights))
    parts = parallel.predict_replicas(x, verbose=0)
    alone = [model.predict(x, verbose=0) for model in (first, second)]
    if case.name != "own_steps":
        assert difference(parts, alone) < case.tolerance
    spread = keras.tree.flatten(parallel.disagreement(x, verbose=0))
    assert all(one.shape == (37,) and np.isfinite(one).all() for one in spread)
    parallel.save_weights(tmp_path / "tower.weights.h5")
    kept = parallel.get_weights()
    parallel.set_weights([0 * weight for weight in kept])
    parallel.load_weights(tmp_path / "tower.weights.h5")
    assert difference(parallel.get_weights(), kept) == 0
