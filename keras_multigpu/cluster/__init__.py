"""Devices of other machines.

On JAX every machine runs the same script, in which `join` brings the processes together.
"""

from keras_multigpu.cluster.joining import join
from keras_multigpu.engines import ClusterError

__all__ = ["ClusterError", "join"]
