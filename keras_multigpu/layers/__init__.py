"""The Keras layers that the modes are made of, each usable alone."""

from keras_multigpu.layers.batch import BatchMerge, BatchSlice

__all__ = ["BatchMerge", "BatchSlice"]
