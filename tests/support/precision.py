"""The scope of tests that compare in float64."""

import contextlib
import types
from unittest import mock

import keras


def double_precision():
    """JAX has float64 only where it is asked for; TensorFlow always has it."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    # In older versions it is experimental.
    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True)


@contextlib.contextmanager
def keras_in_double_precision():
    """Scope in which Keras's `mean`, `var` and attention of float64 on JAX don't use float32."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax
    from jax import numpy as jnp
    from keras.src.backend.common import dtypes  # noqa: TID251
    from keras.src.backend.jax import nn  # noqa: TID251

    of_keras = dtypes._lattice_result_type

    def result_type(*args):
        return "float64" if "float64" in map(str, args) else of_keras(*args)

    wide = types.SimpleNamespace(**{**vars(jnp), "float32": jnp.float64})
    # JAX's own attention has its softmax in float32; without it, Keras takes Keras's.
    attention = jax.nn.dot_product_attention
    del jax.nn.dot_product_attention
    try:
        with (
            mock.patch.object(dtypes, "_lattice_result_type", result_type),
            mock.patch.object(nn, "jnp", wide),
        ):
            yield
    finally:
        jax.nn.dot_product_attention = attention


@contextlib.contextmanager
def all_in_double_precision():
    """Scope in which models and losses are in float64; each test gets Keras's settings anew."""
    with double_precision():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        yield
