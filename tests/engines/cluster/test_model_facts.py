"""What joined processes compare of their models: settings, code, losses and metrics."""

import functools

import keras
from keras.optimizers.schedules import ExponentialDecay
from support import process_script as script

from keras_multigpu.engines.cluster.listing import around_difference
from keras_multigpu.engines.cluster.model_facts import facts_of_compilation, facts_of_model


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
        name: (facts_of_model(model).checksum, facts_of_compilation(model).checksum)
        for name, model in models.items()
    }


def test_what_a_model_is_compiled_with_is_compared():
    found = _described()
    assert len(set(found.values())) == len(found)
    keras.metrics.AUC()  # in one process alone: automatic names then differ
    assert found == _described()


# Layers that compute something else, without another weight.
LAYERS = {
    "plain": lambda: keras.layers.Dense(3),
    "activation": lambda: keras.layers.Dense(3, activation="tanh"),
    "function": lambda: keras.layers.Dense(3, activation=lambda x: 2 * x),
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


def test_settings_of_layers_are_compared():
    def described():
        return {
            name: facts_of_model(keras.Sequential([keras.Input((2,)), make()])).checksum
            for name, make in LAYERS.items()
        }

    found = described()
    assert len(set(found.values())) == len(found)
    keras.utils.set_random_seed(11)  # what is drawn is compared with the weights
    assert found == described()


def test_settings_of_keras_are_compared():
    before, found = keras.config.epsilon(), set()
    for epsilon in (before, 1e-3):
        keras.config.set_epsilon(epsilon)
        found.add(facts_of_compilation(_compiled()).checksum)
    keras.config.set_epsilon(before)
    assert len(found) == 2


class Own(keras.layers.Dense):
    """Keeps what a process has of its own."""

    def __init__(self, number):
        super().__init__(3, activation=functools.partial(print, self))
        self.number, self.listed = number, [number]
        self.listed.append(self.listed)


def test_what_a_process_has_of_its_own_is_none_of_the_models():
    one, other = (
        facts_of_model(keras.Sequential([keras.Input((2,)), Own(number)])) for number in (0, 1)
    )
    assert one.checksum == other.checksum


def test_the_first_difference_is_told():
    one, other = (
        facts_of_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation)]))
        for activation in ("tanh", "relu")
    )
    its, first = (told.told(one.digests, other.digests) for told in (one, other))
    assert its.startswith("layer 'dense")
    assert its.endswith(": activation='tanh'")
    assert first.endswith(": activation='relu'")
    assert one.told(one.digests[:-1], one.digests).startswith("variable '")
    one.texts.pop()
    assert one.told(one.digests[:-1], one.digests) == "nothing more"


def test_long_texts_are_told_near_the_difference():
    assert around_difference("units=3", "units=4") == ("units=3", "units=4")
    long = [200 * "a" + end + 200 * "z" for end in ("b", "c")]
    for text, end in zip(around_difference(*long), ("b", "c")):
        assert text == f"...{120 * 'a'}{end}{119 * 'z'}..."
