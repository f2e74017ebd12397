"""Four virtual devices for every test, made before the backend starts.

The backend is Keras's: `KERAS_BACKEND=jax pytest` runs the tests on JAX. What only one of them has
is tested in a folder of its own.
"""

import gc
import os
import tempfile

import keras
import numpy as np
import pytest

from keras_multigpu import use_virtual_devices

BACKEND = keras.backend.backend()
collect_ignore = ["on_jax" if BACKEND == "tensorflow" else "on_tensorflow", "peers"]
if BACKEND != "tensorflow":
    # Nothing in them depends on the backend: they are run once.
    names = ("reports_prediction", "reports_report", "sparse_code", "sparse_encoder", "zoo_files")
    collect_ignore += [f"test_{name}.py" for name in names]

use_virtual_devices(4)


def pytest_configure(config):
    """What one worker has compiled with JAX, the others need not."""
    if BACKEND == "jax" and not hasattr(config, "workerinput"):
        config.compiled = tempfile.TemporaryDirectory()
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.compiled.name
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_unconfigure(config):
    """Removes what was compiled."""
    if hasattr(config, "compiled"):
        config.compiled.cleanup()


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
    # TensorFlow never forgets a graph that has gradients of its own. What is left of a test is not
    # looked through again and again by all that follow.
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng():
    """A generator of random arrays."""
    return np.random.default_rng(7)
