"""One parallel model per mode."""

from keras_multigpu.modes.base import OPTIONS, ParallelModel, mode_with
from keras_multigpu.modes.building import build_parallel, making_template
from keras_multigpu.modes.data import DataParallel
from keras_multigpu.modes.forgotten import watch_kept, watch_template
from keras_multigpu.modes.model import ModelParallel
from keras_multigpu.modes.tower import TowerParallel
