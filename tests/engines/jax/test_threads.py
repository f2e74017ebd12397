"""Virtual devices have threads enough, so that no step waits for ever."""

import pytest
from support.scripts import run_python

_TRAIN = """
import sys, keras, numpy as np, keras_multigpu as k
devices, steps = int(sys.argv[1]), int(sys.argv[2])
k.use_virtual_devices(devices)
layers = [keras.layers.Dense(512, "tanh"), keras.layers.Dense(512, "tanh"), keras.layers.Dense(8)]
model = k.make_parallel(keras.Sequential([keras.Input((64,)), *layers]), devices)
model.compile("adam", "mse")
x, y = np.random.normal(size=(64 * 20, 64)), np.random.normal(size=(64 * 20, 8))
model.fit(x, y, batch_size=64, epochs=steps // 20, verbose=0)
print(int(model.optimizer.iterations.value))
"""


def _run(code, *args, **environment):
    return run_python("-c", code, *args, **{"PJRT_NPROC": None, **environment})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "steps"),
    [
        (4, 200),
        pytest.param(4, 1000, marks=pytest.mark.slow),
        pytest.param(16, 100, marks=pytest.mark.slow),
    ],
)
def test_a_long_training_ends(devices, steps):
    # As on two cores, whatever there are here: XLA makes as many threads as there are devices.
    done = _run(_TRAIN, devices, steps, NPROC="2")
    assert done.stdout.strip() == str(steps), done.stderr[-2000:]


_LOOK = """
import os, sys, jax, keras_multigpu as k
seen = lambda: os.environ.get("PJRT_NPROC")
for n in sys.argv[2:]:
    k.use_virtual_devices(int(n))
asked = seen()
if sys.argv[1] == "threads":
    jax.numpy.zeros(1)
    k.list_devices()
    names = [open(f"/proc/self/task/{one}/comm").read() for one in os.listdir("/proc/self/task")]
    count = sum(name.startswith("tf_XLAEigen") for name in names)
    print(asked, seen(), count)
else:
    print(asked)
"""


@pytest.mark.slow
def test_the_environment_is_as_before_once_the_devices_are_there():
    done = _run(_LOOK, "threads", 3, 4, NPROC="2")
    assert done.stdout.split() == ["16", "None", "16"], done.stderr
    done = _run(_LOOK, "threads", 4, PJRT_NPROC="3")
    assert done.stdout.split() == ["16", "3", "16"], done.stderr


@pytest.mark.parametrize(("devices", "given"), [([1], "None"), ([8, 1], "None"), ([2], "None")])
def test_enough_threads_are_left_as_they_are(devices, given):
    done = _run(_LOOK, "asked", *devices, NPROC="8")
    assert done.stdout.split() == [given], done.stderr


@pytest.mark.slow
def test_devices_made_otherwise_have_too_few_threads():
    code = (
        "import keras, keras_multigpu as k\n"
        "m = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "k.make_parallel(m, 4).predict(keras.ops.ones((4, 3)), verbose=0)\n"
    )
    forced = "--xla_force_host_platform_device_count=4"
    done = _run(code, XLA_FLAGS=forced, NPROC="2")
    assert "4 virtual devices share 4 threads" in done.stderr
    assert "use_virtual_devices(4)" in done.stderr
    assert done.stderr.count("UserWarning") == 1
    done = _run(code, XLA_FLAGS=forced, NPROC="16")
    assert "UserWarning" not in done.stderr
