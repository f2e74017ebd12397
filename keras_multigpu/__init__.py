"""Multi-GPU training of any Keras model: `make_parallel(model, n_gpus, mode)`."""

from keras_multigpu import (  # engines first: a missing backend is met there
    cluster,
    engines,
    layers,
    reports,
)
from keras_multigpu.devices import list_devices, use_virtual_devices
from keras_multigpu.parallel import make_parallel
from keras_multigpu.version import __version__

__all__ = [
    "__version__",
    "cluster",
    "layers",
    "list_devices",
    "make_parallel",
    "reports",
    "use_virtual_devices",
]
