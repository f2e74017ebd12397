"""The fuzzer draws all there is, tells faults from rounding, and finds none in this library."""

import contextlib
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
    run,
    shrink,
    values,
    worker,
)
from support.fuzz.case import Case, Head, Make, Part, Source
from support.precision import double_precision

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


@pytest.fixture(autouse=True)
def _double_precision():
    with double_precision():
        yield


@pytest.fixture
def instead(monkeypatch):
    """Puts a function of the template in the place of `make_parallel`."""

    def put(function):
        monkeypatch.setattr(
            run.keras_multigpu, "make_parallel", lambda model, *_, **__: function(model)
        )

    return put


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
        compile(program.script(case, "a remark"), name, "exec")


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
    outcome = run.run(_CASE.having(floatx=floatx))
    assert outcome.kind == run.DIFFERENT
    assert "(rounding: " in outcome.detail


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


def test_nan_in_other_places_is_a_difference(instead):
    instead(_scaled(np.nan))
    assert run.run(_CASE).kind == run.DIFFERENT


def _raises(error):
    def function(model):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Shapes must match."), run.CRASHED),
        (KeyError("x"), run.CRASHED),
    ],
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


def test_half_a_minute_of_models_shows_no_difference(tmp_path):
    folder = Path(__file__).parent.parent
    command = [sys.executable, "-W", "ignore", "-m", "support.fuzz", "--seconds", "30"]
    command += ["--seed", "20", "--shrink", "30", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    counts = drive.count(tmp_path)
    scripts = "\n".join(path.read_text() for path in tmp_path.glob("*.small.py"))
    assert done.returncode == 0, done.stdout + done.stderr + scripts
    # How many there are depends on the machine's other work.
    assert counts["equal"] >= max(1, 0.6 * sum(counts.values())), counts
