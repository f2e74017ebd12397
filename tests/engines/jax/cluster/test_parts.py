"""Batches of which each process gives its part: here one process has all devices."""

import contextlib
import types

import numpy as np
import pytest
from jax.experimental import sparse

from keras_multigpu.engines.jax.cluster import parts
from keras_multigpu.engines.jax.joint_placement import placement_on

PLACE = placement_on(("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
GROUP = types.SimpleNamespace(number=0, wait=lambda values: None)


@pytest.mark.parametrize("rows", [8, 6, 1, 0])
def test_a_part_is_put_on_the_devices(rows):
    batch = {"x": np.arange(3.0 * rows, dtype="float32").reshape(rows, 3), "s": np.float32(2)}
    where, is_spread = (PLACE.replicated, PLACE.sharded, GROUP), not rows % 4
    put = parts.put(batch, [rows], *where, is_spread=is_spread)
    for key, value in batch.items():
        np.testing.assert_array_equal(put[key], value)
    assert put["x"].is_fully_replicated == (rows not in (8, 0))


@pytest.mark.parametrize(
    ("counts", "owners"),
    [
        ([3, 5], [0, 1, 1, 1]),
        ([5, 1], [1, 0, 0, 1]),
        ([0, 5], [0, 0, 1, 1]),
        ([5, 0], [0, 1, 0, 1]),
    ],
)
def test_parts_of_other_lengths_are_gathered(counts, owners):
    """Each process would give its rows; here both have the same ones."""
    x, flags = np.arange(10.0, dtype="float32").reshape(5, 2), np.arange(5) % 2 == 0
    found = parts._gather([x, flags], counts, PLACE.sharded, owners, GROUP)
    for leaf, whole in zip((x, flags), found):
        np.testing.assert_array_equal(whole, np.concatenate([leaf[:k] for k in counts]))
        assert whole.dtype == leaf.dtype


@pytest.mark.parametrize(
    ("counts", "owners", "expected"),
    [
        ([4, 4], [0, 0, 1, 1], True),
        ([2, 6], [0, 1, 1, 1], True),
        ([4, 4], [0, 1, 0, 1], False),  # the devices are in another order
        ([5, 3], [0, 0, 1, 1], False),
        ([0, 0], [0, 0, 1, 1], False),
    ],
)
def test_rows_that_are_at_home(counts, owners, expected):
    assert parts._are_at_home(counts, owners) is expected


def test_outputs_of_own_rows():
    """Of two batches in one step: the second process has rows 2, 3, 4 and 6."""
    outputs = {"p": np.arange(7), "q": np.arange(14).reshape(14, 1)}
    found = parts.own_rows(outputs, [[2, 3], [1, 1]], 1)
    np.testing.assert_array_equal(found["p"], [2, 3, 4, 6])
    np.testing.assert_array_equal(found["q"][:, 0], [4, 5, 6, 7, 8, 9, 12, 13])
    with pytest.raises(ValueError, match="a whole number of rows for each row .* 9 rows of an"):
        parts.own_rows(np.arange(9), [[2, 3], [1, 1]], 1)
    with pytest.raises(ValueError, match="Received: an output of shape .., without rows"):
        parts.own_rows(np.float32(1), [[2, 3]], 1)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (sparse.BCOO.fromdense(np.eye(3)), "dense arrays only, on JAX. Received: a BCOO of shape"),
        ((np.ones((3, 2)), np.ones(2)), "the same number of rows. Received: arrays of 2, 3 rows"),
        ((np.ones((3, 2)), np.ones(3), np.ones(())), None),
    ],
)
def test_parts_that_can_not_be_joined_are_refused(batch, expected):
    refusal = pytest.raises(ValueError, match=expected) if expected else contextlib.nullcontext()
    with refusal:
        parts.check(batch)
