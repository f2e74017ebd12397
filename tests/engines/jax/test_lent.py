"""What of a model's state comes from steps, and what somebody has assigned."""

import gc

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.jax.lent import LentState


def test_what_comes_from_no_step_is_assigned():
    lent = LentState(None)
    first, second = jnp.ones(3), jnp.zeros(3)
    assert lent.is_assigned(first)
    lent.note("train_function", ([first], [second]))
    lent.note("test_function", ())  # an evaluation gives no slots, which are those of before
    assert not lent.is_assigned(first)
    assert lent.is_assigned(first * 0.5)
    lent.note("train_function", ([second],))
    assert lent.is_assigned(first)


def test_what_was_given_is_not_kept():
    lent = LentState(None)
    lent.note("train_function", [jnp.ones(3)])
    gc.collect()
    assert not any(ref() is not None for ref in lent._given["train_function"].values())


def test_parts_are_compared_when_they_are_assigned():
    """No part exists twice, so processes can't compare them here."""
    mesh = Mesh(jax.devices()[:2], ("part",))
    spread = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("part")))
    assert not LentState(None).is_assigned(spread)
