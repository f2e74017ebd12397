"""Parts that a step calls directly: each device computes its share of every part."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.loops import LOOPS
from support.parity import difference

from keras_multigpu import make_parallel

ROWS = 64


def _operations(loop, n):
    """Floating-point operations of one device in a training step."""
    keras.utils.set_random_seed(3)
    model = loop()
    model.compile(lambda: keras.optimizers.SGD(0.1))
    model = make_parallel(model, n) if n else model
    model.optimizer.build(model.trainable_variables)
    x = loop.data(np.random.default_rng(0), ROWS)
    x = {name: np.asarray(one, "i4" if one.dtype.kind == "i" else "f4") for name, one in x.items()}
    lists = [model.trainable_variables, model.non_trainable_variables]
    lists += [model.optimizer.variables, model.metrics_variables]
    state = tuple([one.value for one in group] for group in lists)
    if n:
        where = model._parallel_steps.where
        state, x = where.put_state(state), where.put_batch(x)
    compiled = jax.jit(model.train_step).lower(state, (x,)).compile()
    return compiled.cost_analysis()["flops"]


@pytest.mark.thin(9)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda one: one.__name__)
def test_a_devices_share_of_the_work(loop):
    """The rest of a step (the update, losses that compare all rows) is the same on each device."""
    share = _operations(loop, 4) / _operations(loop, None)
    assert share < 0.45


class Dreamer(keras.Model):
    """Trains on noise alone: nothing in its step comes from the batch but the number of rows."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)
        self.net = keras.Sequential([keras.Input((8,)), layers.Dense(32), layers.Dense(1)])
        self.built = True

    @staticmethod
    def data(rng, count):
        return {"row": rng.normal(size=(count, 3))}

    def compile(self, make_optimizer):
        super().compile(make_optimizer())

    def train_step(self, state, data):
        trainable, fixed, slots, metrics = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = jax.random.normal(jax.random.key(1), (x["row"].shape[0], 8))

        def loss(trainable):
            made, _ = self.net.stateless_call(trainable, [], noise)
            return ops.mean(ops.square(made - 1))

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, fixed, slots, metrics)


def test_parts_that_get_noise_only(rng):
    assert _operations(Dreamer, 4) / _operations(Dreamer, None) < 0.45
    results = []
    for n in (None, 4):
        keras.utils.set_random_seed(3)
        model = Dreamer()
        model.compile(lambda: keras.optimizers.SGD(0.1))
        model = make_parallel(model, n) if n else model
        history = model.fit(Dreamer.data(rng, 8), batch_size=8, verbose=0).history
        results.append([history, model.get_weights()])
    assert difference(*results) < 1e-6
