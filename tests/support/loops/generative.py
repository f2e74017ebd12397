"""Autoencoders, diffusion, flows and pixels."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops
from support.loops.base import (
    SIDE,
    WIDTH,
    Images,
    Vectors,
    follow,
    is_real,
    mlp,
    mse,
    rows,
    to_vector,
)


class VariationalAutoencoder(Images):
    def __init__(self):
        super().__init__()
        self.encoder = to_vector(4)
        self.decoder = keras.Sequential(
            [
                keras.Input((2,)),
                layers.Dense(4),
                layers.Reshape((2, 2, 1)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ]
        )

    def phases(self, x):
        def loss():
            mean, log_variance = ops.split(self.encoder(x["image"]), 2, axis=1)
            z = mean + ops.exp(log_variance / 2) * self.noise(x, 2)
            divergence = ops.mean(ops.square(mean) + ops.exp(log_variance) - log_variance - 1)
            return mse(self.decoder(z), x["image"]) + divergence

        return {"loss": ([self.encoder, self.decoder], loss)}


class Quantizer(layers.Layer):
    """The nearest vectors of a codebook; adds a loss."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(seed=3)
        self.codes = self.add_weight(shape=(5, shape[-1]), initializer=start)

    def call(self, x):
        distances = ops.sum(ops.square(x[:, None] - self.codes), axis=-1)
        found = ops.take(self.codes, ops.argmin(distances, axis=1), axis=0)
        self.add_loss(0.25 * mse(ops.stop_gradient(found), x) + mse(found, ops.stop_gradient(x)))
        return x + ops.stop_gradient(found - x)


class VectorQuantized(Vectors):
    """VQ-VAE: reads the losses that its model has added."""

    def __init__(self):
        super().__init__()
        self.vqvae = keras.Sequential(
            [keras.Input((WIDTH,)), layers.Dense(3), Quantizer(), layers.Dense(WIDTH)]
        )

    def phases(self, x):
        def loss():
            return mse(self.vqvae(x["row"]), x["row"]) + sum(self.vqvae.losses)

        return {"loss": ([self.vqvae], loss)}


class ImplicitDiffusion(Images):
    """DDIM: noise rates as a second input, and a moving average of the network."""

    def __init__(self):
        super().__init__()
        self.network, self.average = self._network(), self._network()
        self.average.trainable = False

    @staticmethod
    def _network():
        images, rates = keras.Input((SIDE, SIDE, 1)), keras.Input((1, 1, 1))
        planes = layers.UpSampling2D(SIDE)(layers.Dense(2, activation="tanh")(rates))
        made = layers.Concatenate()([images, planes])
        skipped = made = layers.Conv2D(3, 3, padding="same", activation="tanh")(made)
        made = layers.BatchNormalization(center=False, scale=False)(made)
        made = layers.Conv2D(3, 3, padding="same", activation="tanh")(made) + skipped
        return keras.Model([images, rates], layers.Conv2D(1, 3, padding="same")(made))

    def phases(self, x):
        def loss():
            noise, angle = self.noise(x, SIDE, SIDE, 1), ops.sigmoid(self.noise(x, 1, 1, 1))
            noisy = ops.cos(angle) * x["image"] + ops.sin(angle) * noise
            return mse(self.network([noisy, ops.sin(angle) ** 2], training=True), noise)

        return {"noise_loss": ([self.network], loss)}

    def after(self, x):
        follow(self.average, self.network)


class Diffusion(Images):
    """DDPM: the time step is embedded."""

    def __init__(self):
        super().__init__()
        images, times = keras.Input((SIDE, SIDE, 1)), keras.Input((), dtype="int32")
        embedded = layers.Reshape((1, 1, 3))(layers.Embedding(5, 3)(times))
        made = layers.Conv2D(3, 3, padding="same", activation="swish")(images) + embedded
        self.network = keras.Model([images, times], layers.Conv2D(1, 3, padding="same")(made))

    def phases(self, x):
        def loss():
            times = keras.random.randint((rows(x["image"]),), 0, 5, seed=self.seed)
            share = ops.cast(times + 1, x["image"].dtype)[:, None, None, None] / 6
            noise = self.noise(x, SIDE, SIDE, 1)
            noisy = ops.sqrt(1 - share) * x["image"] + ops.sqrt(share) * noise
            return mse(self.network([noisy, times], training=True), noise)

        return {"loss": ([self.network], loss)}


class Masked(layers.Layer):
    """A convolution that sees only the pixels before each."""

    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(2, 3, padding="same", use_bias=False)

    def build(self, shape):
        self.conv.build(shape)

    def call(self, x):
        mask = np.zeros((3, 3, 1, 1))
        mask[:1], mask[1, :1] = 1, 1
        return ops.conv(x, self.conv.kernel * ops.cast(mask, x.dtype), padding="same")


class PixelCnn(Images):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((SIDE, SIDE, 1)), Masked(), layers.ReLU(), layers.Conv2D(1, 1)]
        )

    def phases(self, x):
        bits = ops.cast(x["image"] > 0, x["image"].dtype)
        return {"loss": ([self.net], lambda: is_real(self.net(bits), bits))}


class RealNvp(Vectors):
    """A flow: coupling layers are called in a loop, each on what the others made."""

    def __init__(self):
        super().__init__()
        half = WIDTH // 2
        self.scales = [mlp(half, 4, half, activation="tanh") for _ in range(3)]
        self.shifts = [mlp(half, 4, half) for _ in range(3)]

    def phases(self, x):
        def loss():
            left, right = ops.split(x["row"], 2, axis=1)
            volume = 0.0
            for scale, shift in zip(self.scales, self.shifts):
                size = scale(left)
                left, right = right * ops.exp(size) + shift(left), left
                volume += ops.sum(size, axis=1)
            density = -ops.sum(left**2 + right**2, axis=1) / 2
            return -ops.mean(density + volume)

        return {"loss": ([*self.scales, *self.shifts], loss)}


class Patches(layers.Layer):
    """Cuts an image into four patches, and embeds them with their positions."""

    def __init__(self):
        super().__init__()
        self.project, self.positions = layers.Dense(5), layers.Embedding(4, 5)

    def build(self, shape):
        self.project.build((None, 4, 4))
        self.positions.build()

    def cut(self, images):
        x = ops.reshape(images, (-1, 2, 2, 2, 2))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4)), (-1, 4, 4))

    def call(self, images):
        return self.project(self.cut(images)) + self.positions(ops.arange(4))


class MaskedAutoencoder(Images):
    """Layers and models are called in turn; the loss is that of the masked patches."""

    def __init__(self):
        super().__init__()
        self.patches = Patches()
        self.encoder = keras.Sequential([keras.Input((None, 5)), layers.Dense(5, "tanh")])
        tokens = keras.Input((None, 5))
        mixed = tokens + layers.MultiHeadAttention(1, 3)(tokens, tokens)
        self.decoder = keras.Model(tokens, layers.Dense(4)(layers.LayerNormalization()(mixed)))
        self.patches.build((None, SIDE, SIDE, 1))

    def phases(self, x):
        def loss():
            order = ops.argsort(self.noise(x, 4), axis=1)
            kept, masked = order[:, :2, None], order[:, 2:, None]
            embedded = self.patches(x["image"])
            encoded = self.encoder(ops.take_along_axis(embedded, kept, axis=1))
            empty = ops.zeros_like(encoded)
            decoded = self.decoder(ops.concatenate([encoded, empty], axis=1))
            wanted = ops.take_along_axis(self.patches.cut(x["image"]), masked, axis=1)
            return mse(decoded[:, 2:], wanted)

        return {"loss": ([self.patches, self.encoder, self.decoder], loss)}


class RadianceField(Vectors):
    """NeRF: the network gets several points of each ray, as rows."""

    def __init__(self):
        super().__init__()
        self.field = mlp(WIDTH, 8, 2)

    def phases(self, x):
        def loss():
            steps = ops.cast(ops.linspace(0.0, 1.0, 4), x["row"].dtype)[:, None]
            points = ops.reshape(x["row"][:, None] + steps * x["near"][:, None], (-1, WIDTH))
            found = ops.reshape(self.field(points), (-1, 4, 2))
            weights = ops.softmax(found[..., 0], axis=1)
            return mse(ops.sum(weights * found[..., 1], axis=1), x["number"][:, 0])

        return {"loss": ([self.field], loss)}
