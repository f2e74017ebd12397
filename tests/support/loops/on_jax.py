"""Training loops in JAX's way: the gradients of each loss, and one update of all weights."""

from __future__ import annotations

import jax
import keras
from keras import ops
from support.loops.common import AnyLoop


class Loop(AnyLoop):
    """A model whose `train_step` calls its parts, and never itself."""

    def compile(self, make_optimizer, **kwargs):
        super().compile(optimizer=make_optimizer(), **kwargs)

    def slope(self, function, x):
        """The gradient of a function's sum."""
        return jax.grad(lambda x: ops.sum(function(x)))(x)

    def scope(self, trainable, fixed):
        pairs = list(zip(self.trainable_variables, trainable))
        pairs += zip(self.non_trainable_variables, fixed)
        return keras.StatelessScope(pairs, collect_losses=True)

    def train_step(self, state, data):
        trainable, fixed, slots, metrics = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        gradients = [ops.zeros_like(value) for value in trainable]
        logs = {}
        for name in self.phases(x):

            def loss(trainable, fixed, name=name):
                with self.scope(trainable, fixed) as scope:
                    value = self.phases(x)[name][1]()
                return value, self.fixed_in(scope)

            (logs[name], fixed), found = jax.value_and_grad(loss, has_aux=True)(trainable, fixed)
            parts = self.phases(x)[name][0]
            chosen = {id(variable) for part in parts for variable in part.trainable_variables}
            for place, variable in enumerate(self.trainable_variables):
                if id(variable) in chosen:
                    gradients[place] += found[place]
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        with self.scope(trainable, fixed) as scope:
            self.after(x)
        return logs, (trainable, self.fixed_in(scope), slots, metrics)

    def test_step(self, state, data):
        trainable, fixed, metrics = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with self.scope(trainable, fixed) as scope:
            logs = {name: loss() for name, (_, loss) in self.phases(x).items()}
        return logs, (trainable, self.fixed_in(scope), metrics)

    def fixed_in(self, scope):
        return [scope.get_current_value(variable) for variable in self.non_trainable_variables]
