"""TensorFlow's strategies, whose scopes a parallel model can't work in."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu import make_parallel

X, Y = np.ones((10, 3), "float32"), np.ones((10, 1), "float32")


def build():
    normalization = keras.layers.BatchNormalization()
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), normalization])


def train(places, strategy):
    """A training, some of whose calls are in the scope of a strategy."""

    def scope(place):
        return strategy.scope() if place in places else contextlib.nullcontext()

    with scope("build"):
        model = build()
    with scope("make"):
        parallel = make_parallel(model, 2)
    with scope("compile"):
        parallel.compile("sgd", "mse")
    with scope("fit"):
        parallel.fit(X, Y, batch_size=5, verbose=0)
    return parallel


@pytest.mark.parametrize(
    ("places", "received"),
    [
        (["build"], r"variable '.*/kernel', which was made in `strategy.scope\(\)`"),
        (["make"], r"`strategy.scope\(\)` of a MirroredStrategy"),
        (["compile"], r"variable '.*', which was made in"),
        (["fit"], "of a MirroredStrategy"),
        (["build", "make", "compile", "fit"], "which was made in"),
    ],
    ids=str,
)
def test_a_strategys_scope_is_refused(places, received):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    with pytest.raises(ValueError, match=f"a strategy of Tensor.*{received}.*Remove the scope"):
        train(places, strategy)


def test_a_strategy_without_a_scope_is_none_of_our_business():
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    assert train([], strategy).optimizer.iterations == 2


def test_a_call_in_a_strategys_replicas_is_refused():
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    parallel = make_parallel(build(), 2)
    with pytest.raises(ValueError, match="of a MirroredStrategy. Remove the scope"):
        strategy.run(lambda: parallel(X))


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_distributed_dataset_is_refused(call):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    data = tf.data.Dataset.from_tensor_slices(X if call == "predict" else (X, Y)).batch(4)
    parallel = make_parallel(build(), 2)
    parallel.compile("sgd", "mse")
    options = {"shuffle": False} if call == "fit" else {}
    with pytest.raises(ValueError, match="of a distributed dataset. Give the"):
        getattr(parallel, call)(
            strategy.experimental_distribute_dataset(data), verbose=0, **options
        )
