"""What a process has assigned since the latest step, among arrays that are on all devices."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from keras_multigpu.engines.jax.joint_steps import JointLentState


@pytest.fixture
def state():
    """Two weights, one that is not trained, a slot and a metric."""
    values = np.arange(4.0, dtype="float32")
    return (
        [jnp.array(values), jnp.array(values)],
        [jnp.array(values)],
        [jnp.array(values)],
        [jnp.array(values)],
    )


@pytest.fixture
def lent(state):
    found = JointLentState(types.SimpleNamespace())
    found.note("train_function", state)
    return found


def test_nothing_is_assigned_by_a_step(lent, state):
    assert lent.assigned(state) == set()


@pytest.mark.parametrize("place", [0, 1])
def test_a_weight_with_other_values(lent, state, place):
    state[place][0] = state[place][0] * 0.5
    assert lent.assigned(state) == {id(state[place][0])}


def test_a_weight_with_a_missing_number(lent, state):
    state[0][1] = state[0][1] * np.nan
    assert lent.assigned(state) == {id(state[0][1])}
    lent.note("train_function", state)
    state[0][1] = jnp.array(state[0][1])
    assert lent.assigned(state) == set()


def test_a_weight_in_another_array_of_equal_values(lent, state):
    """The template moves it, if one process calls the template's `predict`."""
    state[0][0] = state[0][0] + 0
    assert lent.assigned(state) == set()


@pytest.mark.parametrize("place", [2, 3])
def test_a_slot_or_a_metric_in_another_array(lent, state, place):
    state[place][0] = state[place][0] + 0
    assert lent.assigned(state) == {id(state[place][0])}


def test_weights_that_are_forgotten_keep_no_memory(lent, state):
    lent.forget_weights()
    state[0][0] = state[0][0] * 0.5
    assert lent.assigned(state) == set()
