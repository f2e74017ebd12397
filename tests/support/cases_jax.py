"""Cases with steps of their own, as JAX has them: without side effects."""

from __future__ import annotations

import jax
import keras
from keras import layers, ops
from support.case import Case, vectors


class CustomStep(keras.Model):
    """Its own loss, its own metric, its own `train_step`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="tanh")
        self.out = layers.Dense(2)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.mean(ops.abs(y_pred))

    def train_step(self, state, data):
        logs, (*others, metrics) = super().train_step(state, data)
        scope = keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics)))
        with scope:
            self.largest.update_state(ops.max(data[0]))
            logs["largest"] = self.largest.result()
        metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
        return logs, (*others, metrics)


class OwnSteps(keras.Model):
    """A `train_step`, `test_step` and `predict_step` from scratch."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2, activation="tanh")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, inputs):
        return self.out(inputs)

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, state, data):
        trainable, fixed, slots, metrics = state
        x, y = data[:2]

        def loss(trainable, fixed):
            y_pred, fixed = self.stateless_call(trainable, fixed, x)
            return ops.mean(ops.square(y_pred - y)), (y_pred, fixed)

        gradients, (y_pred, fixed) = jax.grad(loss, has_aux=True)(trainable, fixed)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        metrics = self.error.stateless_update_state(metrics, y, y_pred)
        logs = {"error": self.error.stateless_result(metrics)}
        return logs, (trainable, fixed, slots, metrics)

    def test_step(self, state, data):
        trainable, fixed, metrics = state
        x, y = data[:2]
        y_pred, fixed = self.stateless_call(trainable, fixed, x)
        metrics = self.error.stateless_update_state(metrics, y, y_pred)
        return {"error": self.error.stateless_result(metrics)}, (trainable, fixed, metrics)

    def predict_step(self, state, data):
        outputs, fixed = self.stateless_call(*state, keras.utils.unpack_x_y_sample_weight(data)[0])
        return {"twice": 2 * outputs}, fixed


class LossesInStep(keras.Model):
    """Reads its regularization losses in its own step, and its inputs in its loss."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")

    def call(self, inputs):
        return self.out(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.cast(y, "float32") - y_pred) * ops.abs(x[:, :1]))

    def train_step(self, state, data):
        trainable, fixed, slots, metrics = state
        x, y = data[:2]

        def loss(trainable, fixed):
            y_pred, fixed, losses = self.stateless_call(trainable, fixed, x, return_losses=True)
            return self.compute_loss(x, y, y_pred) + sum(losses), fixed

        value_and_gradients = jax.value_and_grad(loss, has_aux=True)
        (value, fixed), gradients = value_and_gradients(trainable, fixed)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, fixed, slots, metrics)


BACKEND_CASES = [
    Case("custom_step_and_loss", CustomStep, vectors),
    Case("own_steps", OwnSteps, vectors),
    Case("losses_in_own_step", LossesInStep, vectors),
]
