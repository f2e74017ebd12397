"""Four virtual devices for every test, made before the backend starts."""

import keras
import numpy as np
import pytest

from keras_multigpu import use_virtual_devices

use_virtual_devices(4)


@pytest.fixture(autouse=True)
def _fresh_state():
    """The same random numbers for every test, whatever ran before it."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    floatx = keras.config.floatx()
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def rng():
    """A generator of random arrays."""
    return np.random.default_rng(7)
