"""Devices of other machines.

On TensorFlow one process uses them all: the other machines run `python -m keras_multigpu serve`,
and `connect` gives the names of their devices, for `make_parallel(model, devices=...)`. On JAX
every machine runs the same script, in which `join` brings the processes together.
"""

from keras_multigpu.cluster.connection import connect, disconnect
from keras_multigpu.cluster.joining import join
from keras_multigpu.cluster.serving import serve
from keras_multigpu.engines import ClusterError

__all__ = ["ClusterError", "connect", "disconnect", "join", "serve"]
