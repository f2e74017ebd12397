"""Whatever a model is compiled with: the weights of one device."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.models import mlp
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(5)

OPTIMIZERS = {
    "sgd_momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adam_amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 5)),
}
if hasattr(keras.optimizers, "Muon"):
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)


def _train(build=mlp, rows=70, target=None, epochs=2, **arguments):
    """Trains a plain and a parallel model; returns both, and their histories."""
    rng = np.random.default_rng(5)
    plain, parallel = build(), make_parallel(build(), 4)
    x = rng.normal(size=(rows, *plain.input_shape[1:]))
    y = rng.normal(size=(rows, 2)) if target is None else target(rng, rows)
    histories = []
    for model in (plain, parallel):
        options = {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **arguments}
        # Objects with a state are made afresh for each of the two.
        makers = {k: v for k, v in options.items() if getattr(v, "__name__", "") == "<lambda>"}
        options.update({name: make() for name, make in makers.items()})
        model.compile(**options)
        history = model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
        histories.append(history.history)
    return plain, parallel, histories


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    plain, parallel, histories = _train(optimizer=OPTIMIZERS[name])
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 2e-2), ("mixed_float16", 2e-3)]
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_mixed_precision(policy, tolerance, jit_compile):
    """The replicas' matrices have fewer rows, which rounds the sums of half precision otherwise."""
    keras.config.set_dtype_policy(policy)
    plain, parallel, histories = _train(optimizer="adam", jit_compile=jit_compile)
    assert parallel.dtype_policy.name == policy
    assert type(parallel.optimizer) is type(plain.optimizer)
    assert difference(*histories) < tolerance
    assert difference(variables(plain), variables(parallel)) < tolerance


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"steps_per_execution": 3}], ids=str)
def test_ways_of_running(option):
    plain, parallel, histories = _train(metrics=["mae"], **option)
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


def _lstm():
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((5, 3))
    x = layers.LSTM(4, return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GRU(4)(x)))


def _embedding():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(9, 3),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


@pytest.mark.parametrize("build", [mlp, _lstm, _embedding])
def test_compiled_by_xla(build):
    plain, parallel, histories = _train(build, jit_compile=True)
    assert parallel.jit_compile
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


def in_batch_negatives(y_true, y_pred):
    logits = ops.matmul(y_pred, ops.transpose(ops.cast(y_true, y_pred.dtype)))
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(logits)[0]), logits, from_logits=True
    )


def batch_mean(y_true, y_pred):
    """A scalar, which hides how many rows there were."""
    return ops.mean(ops.abs(y_true - y_pred)) / ops.std(y_pred)


@pytest.mark.parametrize("loss", [in_batch_negatives, batch_mean, "cosine_similarity"])
def test_losses_over_the_whole_batch(loss):
    plain, parallel, histories = _train(loss=loss)
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


# Keras's `MeanIoU` asks JAX for 64 bits.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.slow_on_jax
def test_metrics_over_the_whole_batch():
    def labels(rng, rows):
        return np.eye(2)[rng.integers(0, 2, rows)].astype("float32")

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((6,)), layers.Dense(2, activation="softmax")])

    _, _, histories = _train(
        build,
        target=labels,
        loss="categorical_crossentropy",
        metrics=lambda: [
            "accuracy",
            "auc",
            keras.metrics.F1Score(),
            keras.metrics.R2Score(),
            keras.metrics.TopKCategoricalAccuracy(1, name="top"),
            keras.metrics.MeanIoU(2, sparse_y_true=False, sparse_y_pred=False, name="iou"),
            batch_mean,
        ],
        weighted_metrics=lambda: [keras.metrics.Precision(name="precise")],
    )
    assert difference(*histories) < 2e-5


def test_names_in_the_logs():
    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        outputs = {"a": layers.Dense(2, name="a")(inputs), "b": layers.Dense(2, name="b")(inputs)}
        return keras.Model(inputs, outputs)

    _, _, (plain, parallel) = _train(
        build,
        target=lambda rng, rows: {name: rng.normal(size=(rows, 2)) for name in "ab"},
        loss={"a": "mse", "b": keras.losses.Huber(name="huber")},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics=lambda: {"a": ["mae"], "b": [keras.metrics.MeanSquaredError(name="square")]},
    )
    assert list(plain) == list(parallel)
    assert difference(plain, parallel) < 2e-5


def test_layers_frozen_and_unfrozen_after_wrapping(rng):
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(4),
                layers.BatchNormalization(center=False, scale=False),
                layers.Dense(2),
            ]
        )

    x, y = rng.normal(size=(40, 6)), rng.normal(size=(40, 2))
    plain, parallel = build(), make_parallel(build(), 4)
    first = parallel.template.layers[0]
    for frozen in (True, False, True):
        for model in (plain, parallel):
            model.layers[0].trainable = model.layers[1].trainable = not frozen
            model.compile(keras.optimizers.SGD(0.05), "mse")
            before = model.layers[0].get_weights()
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            assert (difference(before, model.layers[0].get_weights()) == 0) == frozen
        assert difference(variables(plain), variables(parallel)) < 2e-5
    parallel.trainable = False
    assert not first.trainable
    assert parallel.trainable_variables == []


@pytest.mark.parametrize("mode", ["data", "tower", "model"])
def test_layers_in_full_precision_within_a_mixed_model(mode, rng):
    """A head in float32 computes with its weights as they are, not rounded to float16."""
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.normal(size=(16, 2))
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy("mixed_float16")
        models.append(keras.Sequential([keras.Input((6,)), layers.Dense(2, dtype="float32")]))
        keras.config.set_dtype_policy("float32")
    plain, template = models
    parallel = make_parallel(template, 2, mode=mode)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-6
    assert difference(plain.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-6


class Counts(layers.Layer):
    """Counts rows, in float32."""

    def __init__(self):
        super().__init__(dtype="float32")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.seen.assign(self.seen + ops.cast(ops.shape(inputs)[0], "float32"))
        return inputs


def test_a_count_in_full_precision_within_a_mixed_model():
    keras.config.set_dtype_policy("mixed_float16")
    parallel = make_parallel(keras.Sequential([keras.Input((3,)), Counts(), layers.Dense(1)]), 4)
    parallel.layers[0].seen.assign(2049.0)  # float16 rounds it
    parallel.compile("sgd", "mse")
    parallel.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert float(parallel.layers[0].seen.value) == 2057.0


def test_single_steps_of_a_template_that_accumulates(rng):
    x, y = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 2))
    found = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        model = make_parallel(model, 2) if is_parallel else model
        losses = [model.train_on_batch(*batch) for batch in zip(x, y)]
        found.append([*map(np.asarray, losses), *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_compiled_template_and_its_parallel_model_train_in_turns(rng):
    """Each has its own slots: on JAX a step takes over the memory of its model's."""
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 2))
    template = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    template.compile(keras.optimizers.Adam(0.01), "mse")
    template.fit(x, y, verbose=0)
    parallel, reference = make_parallel(template, 4), keras.models.clone_model(template)
    reference.compile_from_config(template.get_compile_config())
    parallel.predict(x, verbose=0)  # a template warns that trains before
    optimizers = []
    for model in (template, parallel):
        reference.set_weights(template.get_weights())
        reference.optimizer.build(reference.trainable_variables)
        for own, other in zip(reference.optimizer.variables, model.optimizer.variables):
            own.assign(np.array(other))
        for one in (reference, model):
            one.fit(x, y, verbose=0, epochs=3, shuffle=False)
        assert difference(reference.get_weights(), template.get_weights()) < 2e-5
        optimizers.append([np.array(slot) for slot in model.optimizer.variables])
        assert difference(optimizers[-1], [*map(np.array, reference.optimizer.variables)]) < 2e-5
    for model in (parallel, template):
        model.fit(x, y, verbose=0)
