"""One parallel model per mode."""

from keras_multigpu.models.base import ParallelModel
from keras_multigpu.models.building import build_parallel
from keras_multigpu.models.data import DataParallel
from keras_multigpu.models.model import ModelParallel
from keras_multigpu.models.tower import TowerParallel

__all__ = ["DataParallel", "ModelParallel", "ParallelModel", "TowerParallel", "build_parallel"]
