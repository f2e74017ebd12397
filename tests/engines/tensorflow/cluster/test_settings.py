"""Settings of TensorFlow that joined processes compare when a call begins."""

import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow.joint_steps import settings


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
    before = settings()
    turn_on()
    try:
        assert settings() != before
    finally:
        turn_off()
    assert settings() == before
