"""Keras on JAX: the compiler partitions a step over the devices."""

from keras_multigpu.engines.jax.engine import JaxEngine

__all__ = ["JaxEngine"]
