"""Training loops in TensorFlow's way: a tape and an optimizer for each loss."""

from __future__ import annotations

import keras
import tensorflow as tf
from support.loops.common import AnyLoop


class Loop(AnyLoop):
    """A model whose `train_step` calls its parts, and never itself."""

    def compile(self, make_optimizer, **kwargs):
        super().compile(**kwargs)
        self.make_optimizer, self.optimizers = make_optimizer, {}

    def slope(self, function, x):
        """The gradient of a function's sum."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        logs = {}
        for name, (parts, loss) in self.phases(x).items():
            if name not in self.optimizers:
                self.optimizers[name] = self.make_optimizer()
            weights = [variable for part in parts for variable in part.trainable_variables]
            with tf.GradientTape() as tape:
                logs[name] = loss()
            gradients = tape.gradient(logs[name], weights)
            self.optimizers[name].apply_gradients(zip(gradients, weights))
        self.after(x)
        return logs

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {name: loss() for name, (_, loss) in self.phases(x).items()}
