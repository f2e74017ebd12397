"""BatchNormalization by the fused kernel: the results of Keras's own, and where it is used."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from parity import difference, variables

from keras_multigpu import make_parallel


class OwnNormalization(layers.BatchNormalization):
    """A user's own: what it computes is not known."""


def _model(shape, layer, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    x = layers.Conv2D(4, 3)(inputs) if len(shape) == 3 else layers.Dense(4)(inputs)
    x = layer(momentum=0.7, **options)(x)
    x = layers.Dense(3)(layers.Flatten()(layers.Activation("relu")(x)))
    return keras.Model(inputs, x)


def _is_fused(model, x):
    """Whether the traced step has the kernel."""
    step = tf.function(lambda x: model(x, training=True)).get_concrete_function(x)
    graph = step.graph.as_graph_def()
    nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
    return any(node.op == "FusedBatchNormV3" for node in nodes)


CASES = {
    "image": ((6, 6, 2), layers.BatchNormalization, {}, True),
    "rows": ((5,), layers.BatchNormalization, {}, True),
    "sequence": ((4, 5), layers.BatchNormalization, {"center": False}, True),
    "unscaled": ((6, 6, 2), layers.BatchNormalization, {"scale": False, "epsilon": 0.1}, True),
    "frozen": ((6, 6, 2), layers.BatchNormalization, {"trainable": False}, False),
    "other_axis": ((6, 6, 2), layers.BatchNormalization, {"axis": 1}, False),
    "small_epsilon": ((6, 6, 2), layers.BatchNormalization, {"epsilon": 1e-6}, False),
    "double": ((6, 6, 2), layers.BatchNormalization, {"dtype": "float64"}, False),
    "half": ((6, 6, 2), layers.BatchNormalization, {"dtype": "mixed_bfloat16"}, True),
    "own": ((6, 6, 2), OwnNormalization, {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_as_keras_has_it(case, rng):
    shape, layer, options, is_fused = CASES[case]
    x, y = rng.normal(3.0, 2.0, size=(9, *shape)).astype("float32"), rng.normal(size=(9, 3))
    plain, template = _model(shape, layer, **options), _model(shape, layer, **options)
    parallel = make_parallel(template, 1)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    losses = [
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]
        for model in (plain, parallel)
    ]
    close = 2e-2 if case == "half" else 3e-5  # values in bfloat16 are rounded to 3 digits
    assert difference(*losses) < close
    assert difference(variables(plain), variables(parallel)) < close
    assert difference(plain.predict(x, verbose=0), parallel.predict(x, verbose=0)) < close
    assert _is_fused(parallel, x) is is_fused
    assert not _is_fused(plain, x)


def test_a_batch_of_one_value(rng):
    """The variance of a sample is not defined; that of the batch is 0."""
    plain, template = (_model((5,), layers.BatchNormalization) for _ in range(2))
    parallel = make_parallel(template, 1)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((1, 5)), np.ones((1, 3)))
    assert difference(variables(plain), variables(parallel)) < 1e-6


def test_masked_and_compiled(rng):
    """Of what is masked Keras takes the statistics; what is compiled XLA fuses."""
    masked = keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.Masking(),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling1D(),
        ]
    )
    x = rng.normal(size=(6, 4, 2)).astype("float32")
    assert not _is_fused(make_parallel(masked, 2), x)
    parallel = make_parallel(_model((5,), layers.BatchNormalization), 2)
    assert _is_fused(parallel, np.ones((4, 5), "float32"))
    parallel.compile("sgd", "mse", jit_compile=True)
    assert not _is_fused(parallel, np.ones((4, 5), "float32"))


def test_the_layer_is_left_as_it_was():
    template = _model((5,), layers.BatchNormalization)
    parallel = make_parallel(template, 2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(np.ones((4, 5)), np.ones((4, 3)))
    assert not any("call" in vars(layer) for layer in template.layers)
