"""Four virtual devices for every test, made before the backend starts.

The backend is Keras's: `KERAS_BACKEND=jax pytest` runs the tests on JAX. What only one of them has
is tested in a folder of its own.
"""

import collections
import datetime
import gc
import os
import pathlib
import tempfile

import keras
import numpy as np
import pytest
from support.fuzz import quick_xla

from keras_multigpu import use_virtual_devices

BACKEND = keras.backend.backend()
_OTHER = "jax" if BACKEND == "tensorflow" else "tensorflow"
# Processes are begun once for the file, and each run has two of them.
_TOGETHER = ("tests/cluster/test_processes.py",)
_MANY = 4  # cases of a slow test
# Those that take longer than a few seconds: `support/slow.py` has listed them.
_SLOW = {*pathlib.Path(__file__).with_name(f"slow_{BACKEND}.txt").read_text().split("\n")}
os.environ.setdefault("TEST_TURN", str(datetime.date.today().toordinal()))
collect_ignore = [f"engines/{_OTHER}", "peers"]

# For this process and those that it starts: the workers of xdist, too.
os.environ["XLA_FLAGS"] = quick_xla.flags(BACKEND)


def _make_devices(count):
    """Virtual devices: of the processor, or with `TEST_ON_GPU=1` parts of the first GPU."""
    if not os.environ.get("TEST_ON_GPU"):
        return use_virtual_devices(count)
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    part = tf.config.LogicalDeviceConfiguration(memory_limit=3000)  # MB
    first = tf.config.list_physical_devices("GPU")[0]
    return tf.config.set_logical_device_configuration(first, [part] * count)


_make_devices(4)


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files of `_TOGETHER` run on one worker. `xdist_group` has no effect with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.endswith(_TOGETHER) else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Applies our own markers, before `-m` selects by `slow`."""
    if BACKEND != "tensorflow":
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("backend_free")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("backend_free")]
    for item in items:
        is_listed = {item.nodeid, item.nodeid.partition("[")[0]} & _SLOW
        if is_listed or (BACKEND == "jax" and item.get_closest_marker("slow_on_jax")):
            item.add_marker(pytest.mark.slow)
    families = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("thin")
        if marker:
            families[item.parent.nodeid, item.originalname, marker.args[0]].append(item)
    for (_, _, every), cases in families.items():
        # The quick runs of the two backends take different cases. JAX's takes fewer: it compiles.
        every = every if BACKEND == "tensorflow" else 2 * every
        first = 0 if BACKEND == "tensorflow" else min(every // 4, len(cases) - 1)
        quick = cases[first::every]
        for item in cases:
            if item not in quick:
                item.add_marker(pytest.mark.slow)
    is_all = config.option.markexpr == "slow" and not config.option.keyword
    if is_all and not os.environ.get("TEST_EVERY_CASE"):
        _take_turns(config, items)


def _take_turns(config, items):
    """Of slow tests some, each day others; on the backends others. `TEST_EVERY_CASE=1` runs all."""
    families = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            families[item.parent.nodeid, item.originalname].append(item)
    turn = int(os.environ["TEST_TURN"]) + (BACKEND == "jax")
    few, left_out = [], set()
    for cases in families.values():
        if len(cases) < _MANY:
            few += cases
        else:
            left_out.update(set(cases) - set(cases[turn % 4 :: 4]))
    left_out.update(set(few) - set(few[turn % 4 :: 4]))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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
    keras.utils.clear_session()
    forget_graphs()
    # What is left of a test is not looked through again and again by all that follow.
    gc.collect()
    gc.freeze()


def forget_graphs():
    """TensorFlow never forgets a graph that has custom gradients; hundreds of tests make many."""
    if BACKEND == "tensorflow":
        from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251

        known = gradient_registry._registry
        for name in [name for name in known if name.startswith("CustomGradient")]:
            del known[name]


@pytest.fixture
def rng():
    """A generator of random arrays."""
    return np.random.default_rng(7)
