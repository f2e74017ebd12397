"""Settings of TensorFlow that joined processes compare when a call begins."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu import make_parallel


@pytest.mark.parametrize(
    ("turn_on", "turn_off"),
    [
        (tf.debugging.enable_check_numerics, tf.debugging.disable_check_numerics),
        (
            lambda: tf.config.run_functions_eagerly(True),
            lambda: tf.config.run_functions_eagerly(False),
        ),
    ],
    ids=["checks_numerics", "functions_run_eagerly"],
)
def test_settings_that_change_what_a_step_computes(turn_on, turn_off):
    steps = make_parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), 2)
    before = steps._parallel_steps.settings
    turn_on()
    try:
        assert steps._parallel_steps.settings != before
    finally:
        turn_off()
    assert steps._parallel_steps.settings == before
