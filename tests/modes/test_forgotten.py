"""Where several devices are there, and one would be used without a word."""

import contextlib
import copy
import gc
import inspect
import pickle
import warnings

import keras
import numpy as np
import pytest
from support.parity import difference

from keras_multigpu import make_parallel, reports

X, Y = np.ones((12, 3), "float32"), np.zeros((12, 2), "float32")
NEVER_USED = "'plain' is trained on one device: a parallel model of it, on 2 dev.*never used"


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def build(kind="sequential"):
    inputs, dense = keras.Input((3,)), keras.layers.Dense(2)
    models = {
        "sequential": lambda: keras.Sequential([inputs, dense], name="plain"),
        "functional": lambda: keras.Model(inputs, dense(inputs), name="plain"),
        "subclassed": lambda: Subclassed(name="plain"),
    }
    model = models[kind]()
    model.compile("sgd", "mse")
    return model


reported = pytest.mark.parametrize(
    "look",
    [
        lambda model, parallel: reports.memory(model, (X, Y)),
        lambda model, parallel: reports.transfers(parallel, (X, Y)),
        lambda model, parallel: reports.advise(model, 12, n_gpus=(1, 2), steps=1, link="pcie4"),
        lambda model, parallel: reports.scaling(model, (X, Y), n_gpus=(1, 2), repeats=1, verbose=0),
    ],
    ids=["memory", "transfers", "advise", "scaling"],
)


def test_a_call_that_builds_is_no_use():
    for training, is_use in ((None, False), (False, False), (True, True)):
        model = build()
        make_parallel(model, 2)(X, training=training)
        with contextlib.nullcontext() if is_use else pytest.warns(UserWarning, match=NEVER_USED):
            model.fit(X, Y, verbose=0)


@reported
def test_a_report_is_no_use(look):
    model = build()
    parallel = make_parallel(model, 2)
    look(model, parallel)
    with pytest.warns(UserWarning, match=NEVER_USED):
        model.fit(X, Y, verbose=0)


modes = pytest.mark.parametrize("mode", ["data", "tower"])
kinds = pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])


@kinds
@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_model_is_trained_in_place_of_its_parallel_model(kind, is_dropped):
    model = build(kind)
    kept = [make_parallel(model, 2)]
    if is_dropped:
        kept.clear()
        gc.collect()
    assert inspect.signature(model.fit) == inspect.signature(build(kind).fit)
    with pytest.warns(UserWarning, match=NEVER_USED) as caught:
        history = model.fit(X, Y, epochs=2, verbose=0)
    assert caught[0].filename == __file__
    assert len(history.history["loss"]) == 2
    assert not {"fit", "train_on_batch"} & set(vars(model))
    model.fit(X, Y, verbose=0)  # once


def test_a_loop_that_trains_the_model_batch_by_batch():
    model = build()
    make_parallel(model, 2)
    with pytest.warns(UserWarning, match=f"{NEVER_USED}.*`train_on_batch` of the model itself"):
        model.train_on_batch(X, Y)
    assert not {"fit", "train_on_batch"} & set(vars(model))
    model.train_on_batch(X, Y)
    assert model.optimizer.iterations == 2


USES = {
    "fit": lambda parallel: parallel.fit(X, Y, verbose=0),
    "evaluate": lambda parallel: parallel.evaluate(X, Y, verbose=0),
    "predict": lambda parallel: parallel.predict(X, verbose=0),
    "train_on_batch": lambda parallel: parallel.train_on_batch(X, Y),
    "test_on_batch": lambda parallel: parallel.test_on_batch(X, Y),
    "predict_on_batch": lambda parallel: parallel.predict_on_batch(X),
    "call": lambda parallel: parallel(X, training=True),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_the_parallel_model_knows_it(use):
    model = build()
    first, second = make_parallel(model, 2), make_parallel(model, 4)
    USES[use](second)
    assert "fit" not in vars(model)
    model.fit(X, Y, verbose=0)
    assert first.devices != second.devices


def test_the_stand_in_trains_whichever_model_was_asked():
    model, plain = build(), build()
    plain.set_weights(model.get_weights())
    parallel = make_parallel(model, 2)
    for one in (parallel, plain):
        one.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-6
    assert parallel.optimizer.iterations == 2
    assert model.optimizer.iterations == 0


def test_what_is_not_watched():
    model = build()
    make_parallel(model, 1)
    model.fit(X, Y, verbose=0)
    model.fit = lambda: "mine"
    make_parallel(model, 2)
    assert model.fit() == "mine"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_not_watched(copied):
    model = build()
    make_parallel(model, 2)
    other = copied(model)
    before = model.get_weights()
    other.fit(X, Y, verbose=0)
    other.train_on_batch(X, Y)
    assert difference(before, model.get_weights()) == 0
    assert difference(before, other.get_weights()) > 0


# Compiled is only the template.


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_a_template_that_is_compiled_after_make_parallel(method):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    parallel = make_parallel(model, 2)
    with pytest.raises(ValueError, match=r"call `compile\(\)`"):  # Keras's: neither is
        getattr(parallel, method)(X, Y)
    model.compile("sgd", "mse")
    message = f"apart from its template. Received: `{method}` of the.*Call `parallel.compile"
    with pytest.raises(ValueError, match=message):
        getattr(parallel, method)(X, Y)
    parallel.predict(X, verbose=0)
    parallel.compile("sgd", "mse")
    getattr(parallel, method)(X, Y)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@modes
def test_a_template_that_is_compiled_again(mode, method):
    model = build()
    parallel = make_parallel(model, 2, mode)
    getattr(parallel, method)(X, Y)
    model.compile(model.optimizer, "mae")
    with pytest.warns(UserWarning, match=f"'plain' goes on.*Received: `{method}` of the") as told:
        getattr(parallel, method)(X, Y)
    assert told[0].filename == __file__
    getattr(parallel, method)(X, Y)  # once
    other = make_parallel(model, 2)
    model.compile("sgd", "mse")
    other.compile(other.optimizer, "mse")
    getattr(other, method)(X, Y)


# Clones.


@modes
@pytest.mark.parametrize("kind", ["sequential", "functional"])
@pytest.mark.parametrize(
    "options", [{}, {"clone_function": lambda one: one.from_config(one.get_config())}]
)
def test_a_clone_of_a_parallel_model_is_plain(kind, mode, options):
    parallel = make_parallel(build(kind), 2, mode=mode)
    message = f"`keras.models.clone_model` copies the template.*'plain', in mode '{mode}' on 2 dev"
    with pytest.warns(UserWarning, match=message) as caught:
        cloned = keras.models.clone_model(parallel, **options)
    said = [one for one in caught if one.category is UserWarning]  # not NumPy's, in Keras
    assert [one.filename for one in said] == [__file__]
    assert type(cloned) is type(parallel.template)
    assert keras.models.clone_model(parallel.template).name == "plain"  # without a warning
    assert parallel.layers[-1].name == cloned.layers[-1].name
    assert make_parallel(cloned, 2).devices == parallel.devices


@modes
def test_a_clone_of_a_subclassed_parallel_model_is_parallel(mode):
    parallel = make_parallel(build("subclassed"), 2, mode=mode)
    with keras.utils.custom_object_scope({"Subclassed": Subclassed}):
        assert keras.models.clone_model(parallel).devices == parallel.devices


RATE_IS_SET = "The learning rate of the template's optimizer was set after `make_parallel`"


@pytest.mark.parametrize("scaled", [False, True])
def test_the_learning_rate_of_the_template_is_not_that_of_the_parallel_model(scaled):
    model = build()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    parallel = make_parallel(model, 2)
    parallel.optimizer.learning_rate = 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.fit(X, Y, verbose=0)
    model.optimizer.learning_rate = 0.5
    with pytest.warns(UserWarning, match=RATE_IS_SET) as caught:
        parallel.fit(X, Y, verbose=0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.fit(X, Y, verbose=0)
    assert float(parallel.optimizer.learning_rate) == pytest.approx(0.2)
