"""What XLA's own settings make of a program; the other tests compile with quick ones."""

from support.scripts import run_python

_MAXIMA = """
import keras
import numpy as np
from keras import layers, ops

from keras_multigpu import make_parallel, use_virtual_devices

use_virtual_devices(4)


class Mixed(layers.Layer):
    def build(self, shape):
        self.inner = [layers.Dense(shape[-1]) for _ in range(2)]
        for layer in self.inner:
            layer.build(shape)

    def call(self, x):
        share, (one, two) = ops.softmax(5 * x), self.inner
        return share[..., :1] * one(x) + share[..., 1:] * two(x)


for n in (2, 3, 4):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3 * n, 8, 8, 2)), rng.normal(size=(3 * n, 2))
    found = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        pooled = [Mixed(), layers.GlobalMaxPooling2D(), layers.Dense(2)]
        model = keras.Sequential([keras.Input((8, 8, 2)), *pooled])
        model = make_parallel(model, n) if is_parallel else model
        # Compiled, plain Keras may lose gradients of batches of one row, too.
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not is_parallel)
        model.fit(x, y, batch_size=n, shuffle=False, verbose=0)
        found.append(model.get_weights())
    print("apart by", max(float(abs(a - b).max()) for a, b in zip(*found)))
"""


def test_gradients_of_maxima_with_a_row_for_each_device(tmp_path):
    """XLA gives them to the place where it finds the maximum again, or to none."""
    path = tmp_path / "maxima.py"
    path.write_text(_MAXIMA, encoding="utf-8")
    done = run_python(path, XLA_FLAGS=None)
    gaps = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(gaps) == 3, done.stderr
    assert max(gaps) < 1e-5
