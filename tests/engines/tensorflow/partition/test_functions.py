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
