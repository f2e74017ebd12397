"""Gradient descent by a user's own step, on one device and on four."""

import numpy as np
import tensorflow as tf

from keras_multigpu import make_parallel


def updates(model, loss_of):
    """A step of gradient descent."""

    def step(*given):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *given)
        weights = model.trainable_variables
        slopes = tape.gradient(loss, weights)
        for variable, slope in zip(weights, slopes):
            variable.assign_sub(0.1 * slope)
        return loss

    return step


def compared(model, loss_of, batches, **options):
    """Trains on one device and on four; returns what `explain` says."""
    step, first = updates(model, loss_of), model.get_weights()
    plain = tf.function(step, reduce_retracing=True, **options)
    expected = [plain(*one).numpy() for one in batches]
    expected += model.get_weights()
    model.set_weights(first)
    parallel = make_parallel(model, 4)
    spread = parallel.function(step, **options)
    found = [spread(*one).numpy() for one in batches]
    for one, other in zip(expected, [*found, *model.get_weights()], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    return parallel.explain()


def share(text):
    """The percentage that `explain` begins with."""
    return float(text.partition("% of the work on rows")[0].rpartition(" ")[2])
