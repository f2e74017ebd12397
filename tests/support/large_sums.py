"""Sums over the processors of joined processes (JAX): `FOLDER COUNTS NUMBER ADDRESS`.

XLA's reduce-scatter between processes on processors gives wrong sums of large arrays, every now and
then (jax-ml/jax#40830). A step has none of it, and its sums are right.
"""

import sys

import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec

from keras_multigpu import cluster, list_devices, make_parallel
from keras_multigpu.engines.jax.joint_placement import placement_on

ROWS, WIDTH, ROUNDS = 4096, 1024, 15
SHARDS = ("optimizer", "weights")


def sums_are_right(place, axis):
    """Whether all processes get their parts of sums of 16 MB, again and again."""
    rows = PartitionSpec(place.axes)
    part = PartitionSpec(*[None] * axis, place.axes)
    mapped = jax.shard_map(
        lambda value: place.sum_part(value[0], axis),
        mesh=place.mesh,
        in_specs=rows,
        out_specs=part,
        check_vma=False,
    )
    summed = jax.jit(mapped)
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        values = rng.integers(-99, 99, (place.count, ROWS, WIDTH)).astype("float32")
        shape = values.shape
        given = jax.make_array_from_callback(shape, place.sharded, values.__getitem__)
        (own,) = summed(given).addressable_shards
        if not np.array_equal(own.data, values.sum(0)[own.index]):
            return False
    return True


def step_text(names, shard):
    """The compiled step of a model whose gradients are spread."""
    hidden = [keras.layers.Dense(512, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(8)])
    parallel = make_parallel(model, devices=names, shard=shard)
    parallel.compile("adam", "mse")
    x, y = np.ones((8, 512), "float32"), np.ones((8, 8), "float32")
    parallel.fit(x, y, verbose=0)
    return parallel._parallel_steps.compile_step((x, y), True).program.as_text()


def main():
    _, counts, number, address = sys.argv[1:5]
    processes = len(counts.split(","))
    cluster.join(address, processes, int(number), timeout=60)
    names = list_devices()
    names = names[:: len(names) // processes]  # one of each process
    place = placement_on(tuple(names))
    assert all(sums_are_right(place, axis) for axis in (0, 1)), "a sum is wrong"
    for shard in SHARDS:
        assert "reduce-scatter" not in step_text(names, shard), shard


if __name__ == "__main__":
    main()
