"""Cases with steps of their own, and with text, as TensorFlow has them."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops
from support.case import Case, LossOfInputs, OneMetric, OwnLossAndMetric, vectors


class CustomStep(OwnLossAndMetric):
    def train_step(self, data):
        logs = super().train_step(data)
        self.largest.update_state(ops.max(data[0]))
        return {**logs, "largest": self.largest.result()}


class OwnSteps(OneMetric):
    """A `train_step`, `test_step`, `predict_step` and `compute_metrics` from scratch."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.cast(y, "float32")))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.compute_metrics(x, y, self(x), None)

    def test_step(self, data):
        x, y = data[:2]
        return self.compute_metrics(x, y, self(x, training=False), None)

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return {"twice": 2 * self(x, training=False)}

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred)
        return {"error": self.error.result()}


class LossesInStep(LossOfInputs):
    """Reads its regularization losses in its own step, and its inputs in its loss."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True)) + tf.add_n(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def _text():
    words = layers.TextVectorization(vocabulary=["red", "green", "blue"], output_sequence_length=4)
    inputs = keras.Input((), dtype="string")
    x = layers.Embedding(10, 4, mask_zero=True)(words(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _text_data(rng, rows):
    colours = rng.choice(["red", "green blue", "blue red red", "mauve"], size=rows)
    return tf.constant(colours), rng.normal(size=(rows, 2))


class Measured(layers.Layer):
    """Keeps a metric of what passes through; Keras's trainer on JAX loses sight of it."""

    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs):
        self.size.update_state(ops.abs(inputs))
        return inputs


def _measured():
    return keras.Sequential([keras.Input((6,)), layers.Dense(3), Measured(), layers.Dense(2)])


BACKEND_CASES = [
    Case("custom_step_and_loss", CustomStep, vectors),
    Case("own_steps", OwnSteps, vectors),
    Case("losses_in_own_step", LossesInStep, vectors),
    Case("metric_in_a_layer", _measured, vectors),
    Case("text_input", _text, _text_data),
]
