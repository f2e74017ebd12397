"""One device and several: the same logs, outputs and weights for every batch size."""

import keras
import numpy as np
import pytest
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, plainly, take, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(16)

# Fewer rows than devices, or as many as they don't divide; and many. Others are tried on one case.
DEVICES, *SIZES = (4, 5, 8) if keras.backend.backend() == "jax" else (3, 1, 32)

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def _pair(case, n=4, **compile_changes):
    plain, template = build_equal(case)
    parallel = make_parallel(template, n)
    # Plain Keras has other logs of several outputs if it runs eagerly.
    has_one = len(getattr(plain, "outputs", ())) == 1
    is_quick = has_one and not compile_changes
    compile_case(case, plain, **(plainly() if is_quick else compile_changes))
    compile_case(case, parallel, **compile_changes)
    return plain, parallel


@pytest.mark.parametrize(
    ("case", "shuffle"), [(case, number % 2 == 0) for number, case in enumerate(CASES)], ids=str
)
def test_fit_with_an_incomplete_batch(case, shuffle, rng, tmp_path):
    """And what was trained goes through a file into the plain model."""
    x, y = case.data(rng, 70)
    plain, parallel = _pair(case)
    histories = []
    for model in (plain, parallel):
        keras.utils.set_random_seed(3)
        sparse_order = shuffle and not hasattr(x, "tocsr")
        history = model.fit(x, y, batch_size=32, epochs=2, shuffle=sparse_order, verbose=0)
        histories.append(history.history)
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    assert any(gap > 1e-4 for gap in _movement(case, plain)), "the training changed nothing"
    for variable in [*plain.weights, *plain.optimizer.variables]:
        variable.assign(keras.ops.zeros_like(variable.value))
    parallel.save_weights(tmp_path / "trained.weights.h5")
    plain.load_weights(tmp_path / "trained.weights.h5")
    assert difference(variables(plain), variables(parallel)) == 0


def _movement(case, trained):
    (fresh,) = build_equal(case, 1)
    if not fresh.built:
        return [1.0]
    return [
        np.abs(np.subtract(*pair)).max() for pair in zip(fresh.get_weights(), trained.get_weights())
    ]


@every_case
def test_every_batch_size(case, rng):
    x, y = case.data(rng, 40)
    plain, parallel = _pair(case, DEVICES)
    for rows in SIZES:
        part_x, part_y = take(x, rows), take(y, rows)
        if not hasattr(x, "tocsr"):
            logs = [m.train_on_batch(part_x, part_y, return_dict=True) for m in (plain, parallel)]
            assert difference(*logs) < case.tolerance, rows
        outputs = [m.predict(part_x, batch_size=rows, verbose=0) for m in (plain, parallel)]
        assert difference(*outputs) < case.tolerance, rows
        logs = [
            m.evaluate(part_x, part_y, batch_size=rows, verbose=0, return_dict=True)
            for m in (plain, parallel)
        ]
        assert difference(*logs) < case.tolerance, rows
    assert difference(variables(plain), variables(parallel)) < case.tolerance


@pytest.mark.slow_on_jax
def test_every_size_up_to_twice_the_devices(rng):
    case = CASES[0]
    x, y = case.data(rng, 9)
    plain, parallel = _pair(case)
    for rows in range(1, 10):
        logs = [m.train_on_batch(x[:rows], y[:rows], return_dict=True) for m in (plain, parallel)]
        assert difference(*logs) < case.tolerance, rows
    assert difference(variables(plain), variables(parallel)) < case.tolerance


@pytest.mark.parametrize("n", [1, 2, 3])
def test_any_number_of_devices(n, rng):
    case = CASES[0]
    x, y = case.data(rng, 70)
    plain, parallel = _pair(case, n)
    histories = [m.fit(x, y, 32, 2, shuffle=False, verbose=0).history for m in (plain, parallel)]
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    "option", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str
)
def test_options_of_compile(option, rng):
    case = CASES[0]
    x, y = case.data(rng, 70)
    plain, parallel = _pair(case, **option)
    histories = [m.fit(x, y, 32, 2, shuffle=False, verbose=0).history for m in (plain, parallel)]
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance


@pytest.mark.slow_on_jax
def test_sample_and_class_weights(rng):
    case = next(case for case in CASES if case.name == "conv")
    x, y = case.data(rng, 70)
    plain, parallel = _pair(case, weighted_metrics=["accuracy"])
    weights = {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0, 3: 0.0, 4: 1.0}}
    histories = [
        m.fit(x, y, 32, shuffle=False, verbose=0, **weights).history for m in (plain, parallel)
    ]
    assert difference(*histories) < case.tolerance
    logs = [
        m.evaluate(x, y, 32, sample_weight=np.linspace(0, 1, 70), verbose=0, return_dict=True)
        for m in (plain, parallel)
    ]
    assert difference(*logs) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance


def test_the_template_shares_its_weights_at_any_time(rng):
    case = CASES[0]
    x, y = case.data(rng, 33)
    (template,) = build_equal(case, 1)
    parallel = make_parallel(template, 4)
    compile_case(case, parallel)
    parallel.fit(x, y, verbose=0)
    assert difference(template.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-6
    template.set_weights([2 * weight for weight in template.get_weights()])
    assert difference(template.get_weights(), parallel.get_weights()) == 0
    assert difference(template.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-6
    assert difference(np.asarray(template(x)), np.asarray(parallel(x))) < 1e-6
