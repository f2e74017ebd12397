"""What joined processes compare of their models: settings, code, losses and metrics."""

import dataclasses
import functools
import logging
import types

import keras
import pytest
from keras.optimizers.schedules import ExponentialDecay
from support import process_script as script

from keras_multigpu.engines.cluster.model_facts import (
    checksum,
    difference,
    facts_of_compilation,
    facts_of_model,
)


def _compiled(loss="mse", *, frozen=False, rate=0.01, policy="float32", **options):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = script.build()
        model.layers[0].trainable = not frozen
        model.compile(keras.optimizers.SGD(rate), loss, **options)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def _loss(factor):
    def loss(truth, predicted):
        return factor * keras.ops.mean(keras.ops.square(truth - predicted), axis=-1)

    return loss


def _other_loss(truth, predicted):
    return keras.ops.mean(keras.ops.abs(truth - predicted), axis=-1)


COMPILED = {
    "frozen": lambda: _compiled(frozen=True),
    "eager": lambda: _compiled(run_eagerly=True),
    "otherwise": lambda: _compiled(jit_compile=not _compiled().jit_compile),
    "schedule": lambda: _compiled(rate=ExponentialDecay(0.01, 10, 0.9)),
    "other schedule": lambda: _compiled(rate=ExponentialDecay(0.01, 20, 0.9)),
    "half precision": lambda: _compiled(policy="mixed_bfloat16"),
    "several": lambda: _compiled(steps_per_execution=2),
    "name": lambda: _compiled("mae"),
    "function": lambda: _compiled(_other_loss),
    "constant": lambda: _compiled(_loss(2.0)),
    "other constant": lambda: _compiled(_loss(1.0)),
    "integer": lambda: _compiled(_loss(2)),
    "settings": lambda: _compiled(keras.losses.Huber(2.0)),
    "other settings": lambda: _compiled(keras.losses.Huber(1.0)),
    "partial": lambda: _compiled(functools.partial(keras.losses.huber, delta=2.0)),
    "weight": lambda: _compiled(loss_weights=2.0),
    "metrics": lambda: _compiled(metrics=["mae", keras.metrics.AUC(num_thresholds=20)]),
    "other metrics": lambda: _compiled(metrics=["mae", keras.metrics.AUC(num_thresholds=30)]),
    "weighted": lambda: _compiled(weighted_metrics={"last": ["mae"]}),
}


def _described():
    models = {name: make() for name, make in {"plain": _compiled, **COMPILED}.items()}
    return {
        name: (checksum(facts_of_model(model)), checksum(facts_of_compilation(model)))
        for name, model in models.items()
    }


def test_what_a_model_is_compiled_with_is_compared():
    found = _described()
    assert len(set(found.values())) == len(found)
    keras.metrics.AUC()  # in one process alone: automatic names then differ
    assert found == _described()


def _scaled(scale):
    return lambda x: scale * keras.ops.tanh(x)


# Layers that compute something else, without another weight.
LAYERS = {
    "plain": lambda: keras.layers.Dense(3),
    "activation": lambda: keras.layers.Dense(3, activation=_scaled(1.0)),
    "other activation": lambda: keras.layers.Dense(3, activation=_scaled(2.0)),
    "whole number": lambda: keras.layers.Dense(3, activation=lambda x: 2 * x),
    "other number": lambda: keras.layers.Dense(3, activation=lambda x: 3 * x),
    "regularizer": lambda: keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1)),
    "other regularizer": lambda: keras.layers.Dense(
        3, kernel_regularizer=keras.regularizers.L2(0.2)
    ),
    "constraint": lambda: keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1)),
    "list": lambda: keras.layers.Normalization(mean=[1.0, 2.0], variance=[1.0, 1.0]),
    "other list": lambda: keras.layers.Normalization(mean=[1.0, 3.0], variance=[1.0, 1.0]),
    "dictionary": lambda: keras.layers.Lambda(lambda x, s: s * x, arguments={"s": 1.0}),
    "other dictionary": lambda: keras.layers.Lambda(lambda x, s: s * x, arguments={"s": 2.0}),
}


def _defined(body, **named):
    """A layer whose class a script defines, with globals of that script."""
    script = types.ModuleType("script")
    vars(script).update(keras=keras, **named)
    exec(f"class Own(keras.layers.Dense):\n{body}", vars(script))
    return script.Own(3)


# Layers of one's own, whose code or what it names differs.
_CALL = "  def call(self, x): return {} * super().call(x)"
OWN = {
    "code": lambda: _defined(_CALL.format("2")),
    "other code": lambda: _defined(_CALL.format("2 + 0 * x.shape[0]")),
    "constant": lambda: _defined(_CALL.format("3")),
    "global": lambda: _defined(_CALL.format("SCALE"), SCALE=2.0),
    "other global": lambda: _defined(_CALL.format("SCALE"), SCALE=3.0),
    "class attribute": lambda: _defined("  SCALE = 2"),
    "other class attribute": lambda: _defined("  SCALE = 3"),
    "property": lambda: _defined("  @property\n  def scale(self): return 2"),
    "other property": lambda: _defined("  @property\n  def scale(self): return 3"),
    "private": lambda: _having(_defined("  SIZE = 1"), _scale=2.0),
    "other private": lambda: _having(_defined("  SIZE = 1"), _scale=3.0),
    "settings": lambda: _having(keras.layers.Dense(3), settings=Settings(2.0)),
    "other settings": lambda: _having(keras.layers.Dense(3), settings=Settings(3.0)),
    "module": lambda: _defined(_CALL.format("own.SCALE"), own=_module(SCALE=2.0)),
    "other module": lambda: _defined(_CALL.format("own.SCALE"), own=_module(SCALE=3.0)),
    "set": lambda: _having(keras.layers.Dense(3), chosen={"a", "b"}),
    "other set": lambda: _having(keras.layers.Dense(3), chosen={"a", "c"}),
    "tensor": lambda: keras.layers.Dense(3, activation=_shifted(keras.ops.ones(3))),
    "other tensor": lambda: keras.layers.Dense(3, activation=_shifted(keras.ops.zeros(3))),
    "method": lambda: keras.layers.Dense(3, activation=Scale(2.0).apply),
    "other method": lambda: keras.layers.Dense(3, activation=Scale(3.0).apply),
    "function of a class": lambda: keras.layers.Dense(3, activation=Scale(2.0)),
    "other function of a class": lambda: keras.layers.Dense(3, activation=Scale(3.0)),
    "helper": lambda: _defined(_CALL.format("helper()"), helper=_helper(2)),
    "other helper": lambda: _defined(_CALL.format("helper()"), helper=_helper(3)),
}


class Scale:
    """Knows itself, as objects may."""

    def __init__(self, scale):
        self.scale, self.me = scale, self

    def __call__(self, x):
        return self.scale * x

    apply = __call__


def _shifted(tensor):
    return lambda x: x + tensor


@dataclasses.dataclass
class Settings:
    scale: float


def _having(layer, **attributes):
    vars(layer).update(attributes)
    return layer


def _module(**named):
    module = types.ModuleType("own")
    vars(module).update(named, __file__="own.py")
    return module


def _helper(number):
    return lambda: number


def test_settings_of_layers_are_compared():
    def described():
        return {
            name: checksum(facts_of_model(keras.Sequential([keras.Input((2,)), make()])))
            for name, make in {**LAYERS, **OWN}.items()
        }

    found = described()
    assert len(set(found.values())) == len(found)
    keras.utils.set_random_seed(11)  # what is drawn is compared with the weights
    assert found == described()


def test_settings_of_keras_are_compared():
    before, found = keras.config.epsilon(), set()
    for epsilon in (before, 1e-3):
        keras.config.set_epsilon(epsilon)
        found.add(checksum(facts_of_compilation(_compiled())))
    keras.config.set_epsilon(before)
    assert len(found) == 2


def test_a_step_names_what_a_process_has_of_its_own():
    """Who prints, and who writes."""
    body = "  def train_step(self, data): return RANK"
    one, other = (
        facts_of_model(keras.Sequential([keras.Input((2,)), _defined(body, RANK=rank)]))
        for rank in (0, 1)
    )
    assert checksum(one) == checksum(other)


def _itself():
    listed = [1.0]
    listed.append(listed)
    layer = _having(keras.layers.Dense(3), listed=listed)
    return _having(layer, act=functools.partial(print, layer, Scale(2.0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: _defined(_CALL.format("(1 if RANK else 1)"), RANK=number),
        lambda number: _having(_defined("  def call(self, x): return self.rank * x", rank=number)),
        lambda number: _having(_defined("  SIZE = 1"), _calls=number),
        lambda number: _having(
            keras.layers.Dense(3), make=functools.partial(print, _logger(number))
        ),
        lambda number: _itself(),
    ],
)
def test_what_a_process_has_of_its_own_is_none_of_the_models(make):
    """Its number, what it counts, loggers; and objects that refer to themselves."""
    one, other = (
        facts_of_model(keras.Sequential([keras.Input((2,)), make(number)])) for number in (0, 1)
    )
    assert checksum(one) == checksum(other)


def _logger(number):
    logger = logging.Logger(f"process {number}")
    logger.setLevel(10 * number)
    return logger


def test_the_first_difference_is_told():
    one, other = (
        facts_of_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation)]))
        for activation in ("tanh", "relu")
    )
    its, first = difference(one, other)
    assert its.startswith("layer 'dense")
    assert its.endswith(": activation='tanh'")
    assert first.endswith(": activation='relu'")
    assert difference(one, one[:-1])[1] == "nothing there"
    long = [[("", 200 * "a" + end)] for end in ("b", "c")]
    assert [text[-1] for text in difference(*long)] == ["b", "c"]
