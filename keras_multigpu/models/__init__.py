"""One parallel model per mode."""

from keras_multigpu.models.base import ParallelModel, parallel_class
from keras_multigpu.models.data import DataParallel

__all__ = ["DataParallel", "ParallelModel", "parallel_class"]
