"""The TensorFlow engine: steps of one device, traced, and computed by several."""

from keras_multigpu.engines.tensorflow.engine import TensorFlowEngine

__all__ = ["TensorFlowEngine"]
