"""One parallel model per mode."""

from keras_multigpu.models.base import ParallelModel, build_parallel
from keras_multigpu.models.data import DataParallel

__all__ = ["DataParallel", "ParallelModel", "build_parallel"]
