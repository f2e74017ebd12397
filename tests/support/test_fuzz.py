"""The fuzzer draws all there is, tells faults from rounding, and finds none in this library."""

import contextlib
import functools
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from support.fuzz import (
    catalogue,
    draw,
    drive,
    heads,
    optimizers,
    program,
    rounding,
    run,
    scripts,
    settings,
    shrink,
    trainings,
    values,
    worker,
)
from support.fuzz.case import Case, Head, Make, Part, Source, Trial
from support.precision import double_precision, keras_in_double_precision

pytestmark = pytest.mark.slow

_DENSE = Make("layers.Dense", (("units", "3"), ("activation", "'tanh'")))
_CASE = Case(
    "by hand",
    (Source("keras.Input((6,))", "rng.normal(size=(rows, 6))"),),
    "i",
    (Part((_DENSE,)), Part((Make("layers.LayerNormalization"),)), Part((_DENSE,))),
    (Head((Part((Make("layers.Dense", (("", "2"),)),)),), "rng.normal(size=(rows, 2))"),),
    optimizer=Make("keras.optimizers.Adam", (("learning_rate", "0.05"), ("amsgrad", "True"))),
)
# Quick to compile: what differs is trained again and again, to judge the difference.
_SMALL = _CASE.having(
    trunk=_CASE.trunk[:1], optimizer=Make("keras.optimizers.SGD", (("learning_rate", "0.05"),))
)


@pytest.fixture(autouse=True)
def _double_precision():
    with double_precision(), keras_in_double_precision():
        yield


@pytest.fixture
def instead(monkeypatch):
    """Puts a function of the template in the place of `make_parallel`."""

    def put(function):
        monkeypatch.setattr(
            trainings.keras_multigpu, "make_parallel", lambda model, *_, **__: function(model)
        )

    return put


_OTHERS = tuple(
    Trial((f"{scale} * rng.normal(size=(rows, 6))",), seed, rows)
    for seed, (scale, rows) in enumerate([(1.0, 3), (30.0, 7), (0.1, 4)], 1)
)


def _scaled(by):
    def scale(model):
        model.set_weights([weight * by for weight in model.get_weights()])
        return model

    return scale


def _first_drawable(index, name):
    """A case with a layer; options and inputs that don't fit each other are drawn again."""
    for seed in range(4):
        with contextlib.suppress(draw.UndrawableError):
            return draw.draw_case(seed, index, layer=name)
    return draw.draw_case(4, index, layer=name)


def test_every_layer_is_drawn_or_has_a_reason():
    names = set(catalogue.all_layers())
    assert names == set(catalogue.drawable()) | set(catalogue.undrawable())
    assert set(values.classes(keras.layers)) <= names
    assert len(catalogue.drawable()) > 100
    every = 4 if keras.backend.backend() == "jax" else 1  # JAX takes long to find shapes
    for index, name in list(enumerate(catalogue.drawable()))[::every]:
        case = _first_drawable(index, name)
        assert name in " ".join(map(str, case.makes)), name
        compile(scripts.script(case, "a remark"), name, "exec")


def test_every_loss_metric_and_optimizer_is_drawn_or_has_a_reason():
    families = ("real", "binary", "classes", "one_hot")
    losses = {name for family in families for name in heads.names(keras.losses, family)}
    assert losses | {"CTC"} == set(values.classes(keras.losses, keras.Loss))
    metrics = {name for family in families for name in heads.names(keras.metrics, family)}
    there = set(values.classes(keras.metrics, keras.Metric))
    assert metrics | set(heads.NO_METRICS) >= there
    drawn = set(optimizers.drawable()) | set(optimizers.NOT_DRAWN)
    assert drawn >= set(values.classes(keras.optimizers, keras.optimizers.Optimizer))


def test_the_same_seed_and_index_are_the_same_case():
    assert draw.draw_case(5, 3) == draw.draw_case(5, 3)
    assert draw.draw_case(5, 3) != draw.draw_case(5, 4)


def test_a_model_as_it_is_equals_itself(instead):
    instead(lambda model: model)
    assert run.run(_CASE).kind == run.EQUAL


@pytest.mark.parametrize(("floatx", "by"), [("float64", 1 + 1e-5), ("float32", 1.01)])
def test_other_numbers_are_found(instead, floatx, by):
    instead(_scaled(by))
    outcome = run.run(_SMALL.having(floatx=floatx))
    assert outcome.kind == run.DIFFERENT
    assert "(rounding: " in outcome.detail


def _broken_later(model):
    """The model, whose third training goes wrong."""
    original, calls = model.fit, []

    def fit(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            model.set_weights([weight * 1.01 for weight in model.get_weights()])
        return original(*args, **kwargs)

    model.fit = fit
    return model


def test_trials_train_the_same_model_with_other_data(instead):
    instead(lambda model: model)
    case = _CASE.having(trials=_OTHERS)
    outcome = run.run(case)
    assert (outcome.kind, outcome.trials) == (run.EQUAL, 3)
    plain = run.Plain(case)
    results = [plain.result, *(plain.trial(number) for number in range(3))]
    losses = [result["fit"]["loss"][0] for result in results]
    assert len(set(losses)) == 4
    assert [plain.names["TRIALS"][number]()["X"].shape[0] for number in range(3)] == [3, 7, 4]


@pytest.mark.skipif(not catalogue.ON_JAX, reason="on TensorFlow a trace draws once for all steps")
def test_trials_of_a_model_that_draws_by_pythons_random_numbers():
    draws = Make("layers.Lambda", (("", "lambda x: x * __import__('random').random()"),))
    case = _CASE.having(trunk=(Part((draws,)),), settings=(("run_eagerly", "True"),))
    outcome = run.run(case.having(trials=_OTHERS))
    assert (outcome.kind, outcome.trials) == (run.EQUAL, 3)


def test_a_difference_in_a_later_training_is_found(instead, tmp_path):
    instead(_broken_later)
    outcome = run.run(_SMALL.having(trials=_OTHERS))
    assert (outcome.kind, outcome.trials) == (run.DIFFERENT, 1)
    assert outcome.detail.startswith("trial 1: ")
    assert len(outcome.shown.trials) == 2
    path = worker.write_script(outcome.shown, outcome, tmp_path, ".py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert "1 weights    largest difference" in done.stdout


def test_a_difference_that_a_new_model_shows_is_shown_by_one(instead):
    def wrong_for_large_values(model):
        dense, ops = model.layers[1], keras.ops
        dense.activation = lambda x: ops.where(ops.abs(x) > 10.0, 0.0 * x, ops.tanh(x))
        return model

    instead(wrong_for_large_values)
    outcome = run.run(_SMALL.having(trials=_OTHERS))
    assert (outcome.kind, outcome.trials) == (run.DIFFERENT, 1)
    assert outcome.shown == _SMALL.having(trials=_OTHERS).fresh(1)


def test_other_modes_share_the_plain_model(monkeypatch):
    case = _CASE.having(trials=_OTHERS, wiring="functional")
    sides = settings.sides(case, ("data", "tower", "model"))
    assert [side.mode for side in sides] == ["data", "tower", "model"]
    assert {side.having(mode="data", n=2, options=()) for side in sides} == {case}
    trained = []
    plain = trainings.plain
    monkeypatch.setattr(trainings, "plain", lambda *a, **k: trained.append(1) or plain(*a, **k))
    outcomes = list(run.run_all(sides))
    assert [(one.kind, one.trials) for one in outcomes] == [(run.EQUAL, 3)] * 3
    assert len(trained) == 1
    subclassed = settings.sides(case.having(wiring="subclassed"), ("data", "tower", "model"))
    assert [side.mode for side in subclassed] == ["data", "tower"]


def test_drawn_trials_keep_to_the_batches_that_are_compiled():
    sizes = set()
    for index in range(12):
        with contextlib.suppress(draw.UndrawableError):
            case = draw.draw_case(31, index)
            for trial in case.trials:
                sizes.add(trial.rows)
                assert trial.rows % case.batch in (0, case.rows % case.batch)
    assert len(sizes) > 3


def test_a_difference_that_was_warned_of_is_not_silent(instead):
    def warns(model):
        as_ours = {"warnings": warnings, "__name__": "keras_multigpu.by_hand"}
        exec("warnings.warn('taken for a mean')", as_ours)
        warnings.warn("Keras's own", stacklevel=1)
        return _scaled(1.01)(model)

    instead(warns)
    outcome = run.classify(run.run(_CASE))
    assert outcome.kind == run.WARNED
    assert outcome.warned == ("taken for a mean",)


def test_chaos_is_counted_apart(instead):
    # Without functions of Keras, most of which answer in float32 on JAX.
    steep = Make("Apply", (("", "lambda x: (1e13 * x) % 1.0"),))
    linear = Make("layers.Dense", (("units", "3"),))
    instead(_scaled(1 + 1e-15))
    assert run.run(_CASE.having(trunk=(Part((linear,)), Part((steep,))))).kind == run.NOISE


def test_outputs_are_disturbed_in_their_last_digit_and_keep_their_logits():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    y = np.arange(8) % 3
    for scale in (1.0, 1e4):  # probabilities of 1e4 are clipped, so that a loss of them is small
        x = scale * rng.normal(size=(8, 4))
        expected = float(model.compute_loss(x, y, model(x)))
        original = model.compute_loss
        rounding.disturb_outputs(model, 1)
        disturbed = float(model.compute_loss(x, y, model(x)))
        model.compute_loss = original
        assert abs(disturbed - expected) < 1e-5 * expected
    assert catalogue.ON_JAX or expected > 100  # JAX's arrays outside of a step take no attributes


def test_random_numbers_may_show_with_one_seed_only(monkeypatch):
    monkeypatch.setattr(trainings, "plain", lambda names, eager, reseeded: reseeded)
    case = _CASE.having(mode="tower")
    assert run._draws(case, {}, lambda seed: {"loss": float(seed == 2)})
    assert not run._draws(case, {}, lambda seed: {"loss": 1.0})


def test_random_numbers_that_only_a_trial_uses_are_random():
    ones = Make("layers.Dense", (("", "8"), ("kernel_initializer", "'ones'")))
    large = Make("Apply", (("", "lambda x: ops.where(ops.abs(x) > 1.2, x, 0.0)"),))
    dropout = Make("layers.Dropout", (("", "0.5"),))
    case = _CASE.having(
        sources=(Source("keras.Input((1,))", "np.ones((rows, 1))"),),
        trunk=(Part((ones,)), Part((large,)), Part((dropout,))),
        mode="tower",
        trials=(Trial(("np.ones((rows, 1))",), 1, 7),),
    )
    outcome = run.run(case)
    assert (outcome.kind, outcome.trials) == (run.RANDOM, 0)
    assert outcome.detail.startswith("trial 0: ")


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's gradient of `max`")
def test_a_gradient_that_fusions_lose_is_counted_apart(monkeypatch):
    import jax
    from keras.src.backend.jax import trainer  # noqa: TID251

    as_users = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    monkeypatch.setattr(trainer, "jit", functools.partial(jax.jit, compiler_options=as_users))
    convolution = (
        ("kernel_size", "3"),
        ("dilation_rate", "2"),
        ("bias_regularizer", "keras.regularizers.L1L2(0.1, 0.1)"),
        ("depthwise_constraint", "'max_norm'"),
    )
    makes = [
        Make("Stopped"),
        Make("layers.DepthwiseConv2D", convolution),
        Make("Experts"),
        Make("Experts"),
        Make("layers.GlobalMaxPooling2D"),
    ]
    sigmoid = Make("layers.Dense", (("", "3"), ("activation", "'sigmoid'")))
    tversky = Make("keras.losses.Tversky", (("reduction", "'mean'"),))
    ftrl = (
        ("learning_rate", "0.1"),
        ("l1_regularization_strength", "0.01"),
        ("use_ema", "True"),
        ("weight_decay", "0.01"),
    )
    case = _CASE.having(
        sources=(Source("keras.Input((6, 6, 2))", "np.round(rng.normal(size=(rows, 6, 6, 2)))"),),
        trunk=tuple(Part((make,)) for make in makes),
        heads=(Head((Part((sigmoid,)),), "rng.integers(0, 2, size=(rows, 3))", tversky),),
        wiring="sequential",
        optimizer=Make("keras.optimizers.Ftrl", ftrl),
        settings=(("jit_compile", "True"),),
        rows=5,
        batch=3,
        mode="model",
    )
    outcome = run.run(case)
    # Equal where XLA has other fusions.
    assert outcome.kind in (run.FUSED, run.EQUAL), outcome.detail


def test_nan_in_other_places_is_a_difference(instead):
    instead(_scaled(np.nan))
    assert run.run(_CASE).kind == run.DIFFERENT


def _raises(error):
    def function(model):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError("Shapes must match."), run.CRASHED), (KeyError("x"), run.CRASHED)],
)
def test_errors_of_others_are_crashes(instead, error, kind):
    instead(_raises(error))
    outcome = run.run(_CASE)
    assert outcome.kind == kind
    assert type(error).__name__ in outcome.detail


def test_errors_of_the_library_are_refusals():
    outcome = run.run(_CASE.having(n=9))
    assert outcome.kind == run.REFUSED
    assert "Received: n_gpus=9" in outcome.detail


def test_what_plain_keras_can_not_do_is_not_compared():
    wrong = Part((Make("layers.Reshape", (("", "(5,)"),)),))
    assert run.run(_CASE.having(trunk=(wrong,), wiring="subclassed")).kind == run.PLAIN_FAILS


def test_a_case_is_shrunk_to_what_shows_the_fault():
    two = _CASE.having(
        heads=_CASE.heads * 2, outputs="list", wiring="subclassed", actions=("fit", "predict"), n=4
    )
    small = shrink.shrink(two, lambda case: "LayerNormalization" in program.definitions(case))
    assert [make.name for make in small.trunk[0].makes] == ["layers.LayerNormalization"]
    assert (len(small.trunk), len(small.heads), small.wiring) == (1, 1, "functional")
    assert (small.optimizer.name, small.n, small.rows) == ("keras.optimizers.SGD", 2, 4)
    assert len(small.actions) == 1


def test_a_small_case_keeps_its_outcome(instead):
    instead(_scaled(1.01))
    small, outcome = worker.smallest(_CASE, run.run(_CASE), seconds=1.0)
    assert outcome.kind == run.DIFFERENT
    assert small != _CASE


def test_a_script_runs_and_prints_both(tmp_path):
    outcome = run.Outcome(run.DIFFERENT, "by much")
    path = worker.write_script(_CASE, outcome, tmp_path, ".py")
    assert path.read_text().startswith("# by hand: DIFFERENT. by much\n")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert "weights      largest difference" in done.stdout


def test_a_run_that_is_ended_keeps_its_counts(tmp_path):
    lane = drive.Lane(1, "data", tmp_path, 0.0)
    lane.path.write_text(
        '{"seed": 1, "index": 0, "stage": "plain"}\n'
        '{"seed": 1, "index": 0, "outcome": "equal"}\n'
        '{"seed": 1, "index": 1, "stage": "parallel"}\n{"se'
    )
    lane.process = subprocess.Popen([sys.executable, "-c", ""])
    lane.process.wait()
    lane.watch()
    assert drive.count(tmp_path) == {"equal": 1, "CRASHED": 1}
    assert lane.next_index() == 2


def test_eight_models_show_no_difference(tmp_path):
    folder = Path(__file__).parent.parent
    command = [sys.executable, "-W", "ignore", "-m", "support.fuzz", "--models", "8"]
    command += ["--seed", "20", "--shrink", "30", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    counts = drive.count(tmp_path)
    scripts = "\n".join(path.read_text() for path in tmp_path.glob("*.small.py"))
    assert done.returncode == 0, done.stdout + done.stderr + scripts
    assert sum(counts.values()) == 8
    assert counts["equal"] >= 4, done.stdout  # Keras itself refuses some of what is drawn
