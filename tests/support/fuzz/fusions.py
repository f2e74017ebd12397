"""A scope in which XLA computes each operation by itself, in no loop with others.

A loop of several operations computes a value again if another loop needs it, too. On CPUs two such
values may differ in the last digit: only one has a product and a sum in one instruction. JAX's
gradient of `max` looks for the values that equal the maximum. If none of them does in this loop,
the gradient is lost: for 32 of 60 mixtures of two dense layers with one unit, in plain JAX 0.10.2
on one CPU device (jax-ml/jax#40564 is the same on GPUs). Keras's `R2Score` divides by a difference
of products that is 0 for one row, or 1e-17. Where this happens depends on shapes, and so on how a
batch or a weight is divided.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

# XLA's older emitters give other, wrong numbers without fusions; `quick_xla` asks for them.
_OPTIONS = {"xla_disable_hlo_passes": "fusion", "xla_cpu_use_fusion_emitters": True}


@contextlib.contextmanager
def none_on_jax() -> Iterator[None]:
    """Scope in which Keras has its step functions compiled without fusions."""
    import jax
    from keras.src.backend.jax import trainer  # noqa: TID251

    jit = functools.partial(jax.jit, compiler_options=_OPTIONS)
    with mock.patch.object(trainer, "jit", jit):
        yield
