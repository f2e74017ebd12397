"""What a user's own step takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.models import mlp

from keras_multigpu import make_parallel

KINDS = [{}, {"shard": "weights"}, {"model_devices": 2}]
CALLS = {  # the first, and a second with more arguments
    "a keyword": (((), {}), ((), {"scale": 3.0})),
    "a position": (((), {}), ((3.0,), {})),
    "what has no parameter": (((1.0,), {}), ((1.0, 1.0), {"other": 2.0})),
    "a tensor": (((), {}), ((), {"other": np.full((9, 1), 3.0, "float32")})),
}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_call_gives_more_arguments_than_the_first(options, calls, rng):
    model = make_parallel(mlp(), 4, **options)

    def step(x, scale=1.0, *more, **named):
        return tf.reduce_sum(model(x) * scale * sum([*more, *named.values()], 1.0))

    x, compiled = rng.normal(size=(9, 6)), model.function(step)
    for args, kwargs in [*CALLS[calls], *CALLS[calls]]:
        np.testing.assert_allclose(compiled(x, *args, **kwargs), step(x, *args, **kwargs), 1e-5)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_an_iterator_gives_one_batch_for_all_devices(options, rng):
    x, traces = rng.normal(size=(12, 6)).astype("float32"), []
    model = make_parallel(mlp(), 4, **options)

    @model.function
    def step(batches):
        traces.append(1)
        return tf.reduce_sum(model(next(batches)))

    dataset = tf.data.Dataset.from_tensor_slices(x).batch(5)
    for _ in range(2):
        batches = iter(dataset)
        found = [float(step(batches)) for _ in dataset]
        whole = [float(tf.reduce_sum(model.template(one))) for one in dataset]
        np.testing.assert_allclose(found, whole, rtol=1e-5)
        with pytest.raises(tf.errors.OutOfRangeError):
            step(batches)
    assert len(traces) == 1
    assert "100.0% of the work on rows" in model.explain()


def test_a_step_goes_through_a_dataset(rng):
    x = rng.normal(size=(12, 6)).astype("float32")
    model = make_parallel(mlp(), 2)

    @model.function
    def total(dataset, scale):
        found = tf.constant(0.0)
        for one in dataset:
            found += scale * tf.reduce_sum(model(one))
        return found

    found = total(tf.data.Dataset.from_tensor_slices(x).batch(5), 2.0)
    np.testing.assert_allclose(found, 2 * tf.reduce_sum(model.template(x)), rtol=1e-5)


MADE = {
    "kernel": lambda x: keras.layers.Dense(3)(x),
    "total": lambda x: keras.metrics.Mean()(x),
    "iteration": lambda x: keras.optimizers.SGD().iterations + 0,
    "Variable": lambda x: tf.Variable(1.0) * x,
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_step_makes_each_time_is_refused(name, rng):
    model = make_parallel(mlp(), 4)
    step = model.function(lambda x: MADE[name](model(x)))
    text = f"Received: a step that makes the variable '{name}' each time it is traced. Make layers"
    with pytest.raises(ValueError, match=text):
        step(rng.normal(size=(9, 6)))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_a_step_makes_once_is_kept(options, rng):
    model, kept = make_parallel(mlp(), 4, **options), {}

    def step(x):
        if not kept:
            kept.update(layer=keras.layers.Dense(3), calls=tf.Variable(0.0))
        kept["calls"].assign_add(1.0)
        return kept["layer"](model(x))

    x, compiled = rng.normal(size=(9, 6)).astype("float32"), model.function(step)
    for rows in (9, 5, 9):
        found = compiled(x[:rows])
        np.testing.assert_allclose(found, kept["layer"](model.template(x[:rows])), atol=1e-6)
    assert kept["calls"].numpy() == 3
