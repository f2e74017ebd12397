"""What a user's own step takes."""

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
