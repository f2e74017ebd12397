"""What is told while something takes long."""

import threading

import keras
import numpy as np
import pytest

from keras_multigpu import make_parallel, progress


@pytest.fixture
def impatient(monkeypatch):
    """Ten seconds are over at once."""

    class Timer(threading.Timer):
        def __init__(self, seconds, function):
            assert seconds == 10
            super().__init__(0.0, function)

        def start(self):
            self.run()

    monkeypatch.setattr(progress.threading, "Timer", Timer)


def test_a_long_first_step_is_told_once(impatient, capfd):
    template = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="net")
    parallel = make_parallel(template, 2)
    parallel.compile("sgd", "mse", jit_compile=True)
    x, y = np.ones((8, 3)), np.ones((8, 1))
    parallel.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), verbose=1)
    shown = capfd.readouterr()
    assert shown.err.count("keras_multigpu: 'net' is traced and compiled for 2 devices.") == 1
    assert "devices" not in shown.out
    parallel.predict(x, verbose=0)
    assert capfd.readouterr().err.count("traced and compiled") == 1
    parallel.fit(x, y, verbose=0)
    parallel.predict(x, verbose=0)
    assert "traced" not in capfd.readouterr().err


def test_a_step_that_is_not_compiled_is_not_told_to_be(impatient, capfd):
    """JAX runs it operation by operation; TensorFlow traces it."""
    parallel = make_parallel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), 2)
    parallel.compile("sgd", "mse", jit_compile=False)
    parallel.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    shown = capfd.readouterr().err
    assert "compiled" not in shown
    assert ("is traced for 2 devices." in shown) == (keras.backend.backend() == "tensorflow")


def test_a_long_first_evaluation_is_told(impatient, capfd):
    parallel = make_parallel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), 2)
    parallel.compile("sgd", "mse", jit_compile=True)
    parallel.evaluate(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert capfd.readouterr().err.count("traced and compiled") == 1


def test_a_short_first_step_is_silent(capfd):
    template = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = make_parallel(template, 2)
    parallel.predict(np.ones((8, 3)), verbose=0)
    assert "traced" not in capfd.readouterr().err
    timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    assert all(one.finished.is_set() for one in timers)  # cancelled; the thread may still end


def test_a_step_that_fails_is_told_again(impatient, capfd):
    calls = []

    def fail_once():
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError

    told = progress.with_first_told(fail_once, "long")
    with pytest.raises(ZeroDivisionError):
        told()
    told()
    told()
    assert capfd.readouterr().err == "long\nlong\n"
