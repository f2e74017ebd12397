"""Cases with steps of their own, as JAX has them: without side effects."""

from __future__ import annotations

import jax
import keras
from keras import ops
from support.case import Case, LossOfInputs, OneMetric, OwnLossAndMetric, vectors


class CustomStep(OwnLossAndMetric):
    def train_step(self, state, data):
        logs, (*others, metrics) = super().train_step(state, data)
        scope = keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics)))
        with scope:
            self.largest.update_state(ops.max(data[0]))
            logs["largest"] = self.largest.result()
        metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
        return logs, (*others, metrics)


class OwnSteps(OneMetric):
    """A `train_step`, `test_step` and `predict_step` from scratch."""

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


class LossesInStep(LossOfInputs):
    """Reads its regularization losses in its own step, and its inputs in its loss."""

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
