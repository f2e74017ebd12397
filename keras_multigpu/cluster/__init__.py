"""Devices of other machines.

On TensorFlow one process uses them all: the other machines run `python -m keras_multigpu serve`,
and `connect` gives the names of their devices, for `make_parallel(model, devices=...)`.
"""

from keras_multigpu.cluster.connection import connect, disconnect
from keras_multigpu.cluster.serving import serve
from keras_multigpu.engines import ClusterError

__all__ = ["ClusterError", "connect", "disconnect", "serve"]
