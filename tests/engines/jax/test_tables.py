"""Models that look up tables by indices: what each device computes in a step."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_multigpu import make_parallel
from keras_multigpu.layers import MultiHotDense

_ROWS, _COLUMNS, _UNITS = 64, 7, 32
_SMALL, _LARGE = 97, 5003


class Hashed(layers.Layer):
    """Takes rows of a table by hashed indices."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def build(self, shape):
        self.table = self.add_weight(shape=(self.width, _UNITS))

    def call(self, inputs):
        return ops.take(self.table, (inputs * 40503 + 17) % self.width, axis=0)


class RowSums(layers.Layer):
    """Sums the parts of each row by segments."""

    def call(self, inputs):
        rows = ops.shape(inputs)[0]
        numbers = ops.repeat(ops.arange(rows), inputs.shape[1])
        parts = ops.reshape(inputs, (-1, inputs.shape[-1]))
        return ops.segment_sum(parts, numbers, num_segments=rows)


class GroupSums(layers.Layer):
    """Sums over all rows of the batch with the same index, and gives them to each of these."""

    def call(self, inputs, indices):
        parts, groups = ops.reshape(inputs, (-1, _UNITS)), ops.reshape(indices % 13, (-1,))
        sums = ops.segment_sum(parts, groups, num_segments=13)
        return ops.take(sums, indices[:, 0] % 13, axis=0)


def _pairs(parts):
    return 0.5 * (ops.sum(parts, 1) ** 2 - ops.sum(parts**2, 1))


_FAMILY = {
    "embedding": lambda x, width: layers.Flatten()(layers.Embedding(width, _UNITS)(x)),
    "factorization": lambda x, width: _pairs(layers.Embedding(width, _UNITS)(x)),
    "hashed": lambda x, width: layers.Flatten()(Hashed(width)(x)),
    "multi_hot": lambda x, width: MultiHotDense(_UNITS, width)(x),
    "row_sums": lambda x, width: RowSums()(layers.Embedding(width, _UNITS)(x)),
    "group_sums": lambda x, width: GroupSums()(layers.Embedding(width, _UNITS)(x), x),
}


def _parallel(name, width, n, optimizer="adagrad", **options):
    inputs = keras.Input((_COLUMNS,), dtype="int32")
    outputs = layers.Dense(1)(layers.Dense(64, "relu")(_FAMILY[name](inputs, width)))
    parallel = make_parallel(keras.Model(inputs, outputs), n, **options)
    parallel.compile(optimizer, "mse")
    return parallel


def _data(width, rows=_ROWS):
    rng = np.random.default_rng(0)
    return rng.integers(0, width, (rows, _COLUMNS)).astype("int32"), rng.normal(size=(rows, 1))


def _flops(parallel, width):
    """What a device computes in a training step, as XLA counts it."""
    x, y = _data(width)
    parallel.optimizer.build(parallel.trainable_variables)
    step = parallel._parallel_steps.compile_step((x, y, None), True)
    cost = step.program.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


@pytest.mark.parametrize("name", _FAMILY)
def test_each_device_computes_its_rows(name):
    """Beside a small table's update all is spread."""
    one, four = (_flops(_parallel(name, _SMALL, n), _SMALL) for n in (1, 4))
    assert four < 0.35 * one


@pytest.mark.parametrize("name", ["factorization", "multi_hot"])
def test_a_large_tables_update_is_told(name):
    text = (
        r"Received: '.*' of shape \(5003, 32\), whose update is about (8|9)\d% of what each of 4 "
        r"devices computes for a batch of 64 rows. Give `make_parallel` the option `shard='opt"
    )
    one, four = (_flops(_parallel(name, _LARGE, n), _LARGE) for n in (1, 4))
    assert four > 0.6 * one
    with pytest.warns(UserWarning, match=text):
        _parallel(name, _LARGE, 4).train_on_batch(*_data(_LARGE))
    parallel = _parallel(name, _LARGE, 4, shard="optimizer")
    assert _flops(parallel, _LARGE) < 0.55 * one
    parallel.train_on_batch(*_data(_LARGE))


def test_it_is_told_once():
    (x, y), short = _data(_LARGE, 128), _data(_LARGE, 16)
    parallel = _parallel("factorization", _LARGE, 4)
    with pytest.warns(UserWarning, match="update is about .*a batch of 64 rows") as said:
        parallel.fit(x, y, batch_size=64, verbose=0)
    assert ["update is about" in str(one.message) for one in said].count(True) == 1
    parallel.fit(*short, batch_size=16, verbose=0)
    parallel.evaluate(*short, verbose=0)


def test_a_large_batch_beside_the_table_is_not_told():
    x, y = _data(_LARGE, 2048)
    _parallel("embedding", _LARGE, 4, "sgd").fit(x, y, batch_size=2048, verbose=0)
