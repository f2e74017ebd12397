"""What training loops have in common on both backends."""

import keras


class AnyLoop(keras.Model):
    """A model whose `train_step` calls its parts, and never itself."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)
        self.built = True

    def phases(self, x):
        """By name: the parts to train, and a function that computes their loss."""
        raise NotImplementedError

    def after(self, x):
        """What follows the updates."""
