"""The TensorFlow engine: replicas in one graph, a function call per device."""

from keras_multigpu.engines.tensorflow.engine import TensorFlowEngine

__all__ = ["TensorFlowEngine"]
