"""The scope of tests that compare in float64."""

import contextlib

import keras


def double_precision():
    """JAX has float64 only where it is asked for; TensorFlow always has it."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    # In older versions it is experimental.
    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True)
