"""Distillation, reinforcement learning, style, light, domains."""

from __future__ import annotations

import keras
from keras import layers, ops
from support.loops.base import WIDTH, Images, Vectors, follow, mlp, mse, to_image


class Distillation(Vectors):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(WIDTH, 8, 3), mlp(WIDTH, 3)
        self.teacher.trainable = False

    def phases(self, x):
        def loss():
            wanted = ops.softmax(self.teacher(x["row"], training=False) / 3)
            scores = self.student(x["row"], training=True)
            kinds = ops.one_hot(x["label"], 3, dtype=scores.dtype)
            hard = ops.categorical_crossentropy(kinds, scores, from_logits=True)
            soft = ops.categorical_crossentropy(wanted, scores / 3, from_logits=True)
            return ops.mean(0.1 * hard + 0.9 * soft)

        return {"loss": ([self.student], loss)}


class AdaMatch(Vectors):
    """Domain adaptation: one network on the rows of two domains, together and apart."""

    def __init__(self):
        super().__init__()
        self.net = mlp(WIDTH, 6, 3)

    def phases(self, x):
        def loss():
            both = ops.concatenate([x["row"], x["near"]], axis=0)
            source, target = ops.split(self.net(both, training=True), 2)
            alone = self.net(x["row"], training=True)
            scores = 0.3 * source + 0.7 * alone
            kinds = ops.one_hot(x["label"], 3, dtype=scores.dtype)
            wanted = ops.stop_gradient(ops.softmax(target))
            strong = self.net(x["far"], training=True)
            return ops.mean(
                ops.categorical_crossentropy(kinds, scores, from_logits=True)
                + ops.categorical_crossentropy(wanted, strong, from_logits=True)
            )

        return {"loss": ([self.net], loss)}


class DeepQ(Vectors):
    def __init__(self):
        super().__init__()
        self.q, self.target = mlp(WIDTH, 6, 3), mlp(WIDTH, 6, 3)
        self.target.trainable = False

    def phases(self, x):
        def loss():
            wanted = x["number"][:, 0] + 0.9 * ops.max(self.target(x["near"]), axis=1)
            taken = ops.one_hot(x["label"], 3, dtype=wanted.dtype)
            gap = ops.abs(wanted - ops.sum(self.q(x["row"]) * taken, axis=1))
            return ops.mean(ops.where(gap < 1, gap**2 / 2, gap - 0.5))

        return {"loss": ([self.q], loss)}

    def after(self, x):
        follow(self.target, self.q, rate=0.5)


class DeterministicPolicy(Vectors):
    """DDPG: an actor that is judged by a critic of state and action, and their targets."""

    def __init__(self):
        super().__init__()
        self.actor, self.actor_target = (mlp(WIDTH, 4, 2, activation="tanh") for _ in range(2))
        self.critic, self.critic_target = self._critic(), self._critic()
        self.actor_target.trainable = self.critic_target.trainable = False

    @staticmethod
    def _critic():
        state, action = keras.Input((WIDTH,)), keras.Input((2,))
        both = layers.Concatenate()([state, layers.Dense(3)(action)])
        return keras.Model([state, action], mlp(WIDTH + 3, 4, 1)(both))

    def phases(self, x):
        def judge():
            then = self.critic_target([x["near"], self.actor_target(x["near"])])
            now = self.critic([x["row"], x["far"][:, :2]])
            return mse(x["number"] + 0.9 * then, now)

        def act():
            return -ops.mean(self.critic([x["row"], self.actor(x["row"])]))

        return {"critic": ([self.critic], judge), "actor": ([self.actor], act)}

    def after(self, x):
        follow(self.actor_target, self.actor)
        follow(self.critic_target, self.critic)


class ActorCritic(Vectors):
    """Two heads on a common network, each called directly."""

    def __init__(self):
        super().__init__()
        self.common = mlp(WIDTH, 6, 5)
        self.actor, self.critic = layers.Dense(3), layers.Dense(1)
        for head in (self.actor, self.critic):
            head.build((None, 5))

    def phases(self, x):
        def loss():
            common = self.common(x["row"])
            chances, values = ops.log_softmax(self.actor(common)), self.critic(common)
            gain = ops.stop_gradient(x["number"] - values)[:, 0]
            taken = ops.one_hot(x["label"], 3, dtype=chances.dtype)
            return mse(values, x["number"]) - ops.mean(gain * ops.sum(chances * taken, axis=1))

        return {"loss": ([self.common, self.actor, self.critic], loss)}


class StyleTransfer(Images):
    """AdaIN: a frozen encoder of the image, the style and the result."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = to_image(), to_image()
        self.encoder.trainable = False

    def phases(self, x):
        def moments(features):
            mean = ops.mean(features, axis=(1, 2), keepdims=True)
            return mean, ops.std(features, axis=(1, 2), keepdims=True) + 0.1

        def loss():
            content, style = self.encoder(x["image"]), self.encoder(x["other"])
            (mean, spread), (to_mean, to_spread) = moments(content), moments(style)
            target = (content - mean) / spread * to_spread + to_mean
            made = self.encoder(self.decoder(target))
            found = moments(made)
            return mse(made, target) + mse(found[0], to_mean) + mse(found[1], to_spread)

        return {"loss": ([self.decoder], loss)}


class LowLight(Images):
    """Zero-DCE: losses of the image alone."""

    def __init__(self):
        super().__init__()
        self.dce = to_image()

    def phases(self, x):
        def loss():
            curve, image = ops.tanh(self.dce(x["image"])), x["image"]
            for _ in range(2):
                image = image + curve * (image**2 - image)
            smooth = ops.mean(ops.square(curve[:, 1:] - curve[:, :-1]))
            return ops.mean(ops.square(ops.mean(image, axis=(1, 2, 3)) - 0.6)) + smooth

        return {"loss": ([self.dce], loss)}
