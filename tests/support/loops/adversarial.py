"""Generators and their critics."""

from __future__ import annotations

import keras
from keras import layers, ops
from support.loops.base import SIDE, Images, is_real, mse, to_image, to_score


class DeepConvolutionalGan(Images):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4),
                layers.Reshape((2, 2, 1)),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same"),
            ]
        )
        self.discriminator = to_score()

    def phases(self, x):
        def find():
            both = ops.concatenate([self.generator(self.noise(x, 3)), x["image"]], axis=0)
            fake, real = ops.split(self.discriminator(both), 2)
            return is_real(fake, 0.1) + is_real(real, 0.9)

        def fool():
            return is_real(self.discriminator(self.generator(self.noise(x, 3))), 1.0)

        return {"d_loss": ([self.discriminator], find), "g_loss": ([self.generator], fool)}


class ConditionalGan(Images):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((5,)), layers.Dense(SIDE**2), layers.Reshape((SIDE, SIDE, 1))]
        )
        self.discriminator = to_score(channels=4)

    def phases(self, x):
        kinds = ops.one_hot(x["label"], 3, dtype=x["image"].dtype)
        planes = ops.tile(kinds[:, None, None], (1, SIDE, SIDE, 1))

        def make():
            return self.generator(ops.concatenate([self.noise(x, 2), kinds], axis=1))

        def judge(images):
            return self.discriminator(ops.concatenate([images, planes], axis=-1))

        return {
            "d_loss": (
                [self.discriminator],
                lambda: is_real(judge(make()), 0.0) + is_real(judge(x["image"]), 1.0),
            ),
            "g_loss": ([self.generator], lambda: is_real(judge(make()), 1.0)),
        }


class WassersteinGan(Images):
    """With a gradient penalty, and two steps of the critic for each of the generator."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(SIDE**2),
                layers.BatchNormalization(),
                layers.Reshape((SIDE, SIDE, 1)),
            ]
        )
        self.critic = to_score()

    def phases(self, x):
        real = x["image"]

        def criticize():
            fake = self.generator(self.noise(x, 3), training=True)
            between = real + ops.sigmoid(self.noise(x, 1, 1, 1)) * (fake - real)
            slope = self.slope(lambda images: self.critic(images, training=True), between)
            norm = ops.sqrt(ops.sum(ops.square(slope), axis=(1, 2, 3)) + 1e-12)
            gap = ops.mean(self.critic(fake, training=True)) - ops.mean(self.critic(real))
            return gap + 10 * ops.mean(ops.square(norm - 1))

        def generate():
            return -ops.mean(self.critic(self.generator(self.noise(x, 3), training=True)))

        return {
            "critic_1": ([self.critic], criticize),
            "critic_2": ([self.critic], criticize),
            "generator": ([self.generator], generate),
        }


class CycleGan(Images):
    def __init__(self):
        super().__init__()
        self.to_b, self.to_a = to_image(), to_image()
        self.judge_a, self.judge_b = to_score(), to_score()

    def phases(self, x):
        a, b = x["image"], x["other"]

        def translate():
            fake_b, fake_a = self.to_b(a), self.to_a(b)
            cycle = mse(self.to_a(fake_b), a) + mse(self.to_b(fake_a), b)
            identity = mse(self.to_b(b), b) + mse(self.to_a(a), a)
            scores = mse(self.judge_b(fake_b), 1.0) + mse(self.judge_a(fake_a), 1.0)
            return scores + 10 * cycle + 5 * identity

        def judge(judge, real, translator, source):
            return lambda: mse(judge(real), 1.0) + mse(judge(translator(source)), 0.0)

        return {
            "translation": ([self.to_b, self.to_a], translate),
            "a": ([self.judge_a], judge(self.judge_a, a, self.to_a, b)),
            "b": ([self.judge_b], judge(self.judge_b, b, self.to_b, a)),
        }


class PixToPix(Images):
    """The discriminator gets pairs of images, as a list."""

    def __init__(self):
        super().__init__()
        self.generator = to_image(layers.Conv2D(3, 3, padding="same", activation="relu"))
        first, second = (keras.Input((SIDE, SIDE, 1)) for _ in range(2))
        pair = layers.Concatenate()([first, second])
        self.discriminator = keras.Model([first, second], to_score(2)(pair))

    def phases(self, x):
        def make():
            return self.generator(x["image"])

        def judge(images):
            return self.discriminator([x["image"], images])

        return {
            "g_loss": (
                [self.generator],
                lambda: is_real(judge(make()), 1.0) + ops.mean(ops.abs(make() - x["other"])),
            ),
            "d_loss": (
                [self.discriminator],
                lambda: is_real(judge(make()), 0.0) + is_real(judge(x["other"]), 1.0),
            ),
        }
