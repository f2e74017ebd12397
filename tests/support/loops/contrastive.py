"""Representations learned from pairs."""

from __future__ import annotations

import keras
from keras import layers, ops
from support.loops.base import (
    SIDE,
    WIDTH,
    Images,
    Vectors,
    contrast,
    cosine,
    follow,
    mlp,
    mse,
    rows,
    to_vector,
)


class Views(Images):
    """Loops that compare two views of an image."""

    def __init__(self):
        super().__init__()
        self.augment = keras.Sequential([keras.Input((SIDE, SIDE, 1)), layers.Rescaling(0.5, 0.1)])
        self.encoder = to_vector(5)
        self.projector = mlp(5, 6, 4)


def normalized(encoder):
    """The encoder, and BatchNormalization."""
    return keras.Sequential([encoder, layers.BatchNormalization()])


class SimClr(Views):
    def __init__(self):
        super().__init__()
        self.probe = mlp(5, 3)

    def phases(self, x):
        def contrast_loss():
            first, second = (self.projector(self.encoder(one)) for one in self.views(x))
            return contrast(cosine(first, second)) + contrast(cosine(second, first))

        def probe_loss():
            scores = self.probe(self.encoder(x["image"], training=False))
            kinds = ops.one_hot(x["label"], 3, dtype=scores.dtype)
            return ops.mean(ops.categorical_crossentropy(kinds, scores, from_logits=True))

        return {
            "contrast": ([self.encoder, self.projector], contrast_loss),
            "probe": ([self.probe], probe_loss),
        }


class SimSiam(Views):
    def __init__(self):
        super().__init__()
        self.encoder = normalized(self.encoder)
        self.predictor = mlp(4, 3, 4)

    def phases(self, x):
        def loss():
            encoded = (self.encoder(one, training=True) for one in self.views(x))
            first, second = map(self.projector, encoded)
            pairs = (self.predictor(first), second), (self.predictor(second), first)
            alike = [ops.diagonal(cosine(p, ops.stop_gradient(z))) for p, z in pairs]
            return -ops.mean(alike[0] + alike[1])

        return {"loss": ([self.encoder, self.projector, self.predictor], loss)}


class Byol(Views):
    """The target network is a moving average of the online network."""

    def __init__(self):
        super().__init__()
        self.encoder, self.target = normalized(self.encoder), normalized(to_vector(5))
        self.predictor = mlp(5, 4, 5)
        self.target.trainable = False

    def phases(self, x):
        def loss():
            first, second = self.views(x)
            pairs = (self.predictor(self.encoder(one, training=True)) for one in (first, second))
            wanted = (ops.stop_gradient(self.target(one)) for one in (second, first))
            return sum(mse(made, one) for made, one in zip(pairs, wanted))

        return {"loss": ([self.encoder, self.predictor], loss)}

    def after(self, x):
        follow(self.target, self.encoder)


class NearestNeighbours(Views):
    """NNCLR: positives come from a queue of the latest projections."""

    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(
            shape=(7, 4), initializer=keras.initializers.RandomNormal(seed=2), trainable=False
        )

    def nearest(self, projections):
        found = ops.take(self.queue, ops.argmax(cosine(projections, self.queue), axis=1), axis=0)
        return projections + ops.stop_gradient(found - projections)

    def phases(self, x):
        def loss():
            first, second = (self.projector(self.encoder(one)) for one in self.views(x))
            return contrast(cosine(self.nearest(first), second))

        return {"loss": ([self.encoder, self.projector], loss)}

    def after(self, x):
        new = self.projector(self.encoder(self.views(x)[0]))
        self.queue.assign(ops.concatenate([new, self.queue], axis=0)[:7])


class BarlowTwins(Views):
    def phases(self, x):
        def loss():
            pairs = (self.projector(self.encoder(one)) for one in self.views(x))
            first, second = ((one - ops.mean(one, 0)) / (ops.std(one, 0) + 0.1) for one in pairs)
            count = ops.cast(rows(first), first.dtype)
            correlation = ops.matmul(ops.transpose(first), second) / count
            return mse(correlation, ops.eye(4, dtype=correlation.dtype))

        return {"loss": ([self.encoder, self.projector], loss)}


class Siamese(Vectors):
    """Triplets go into one network together, which returns two distances."""

    def __init__(self):
        super().__init__()
        embed = mlp(WIDTH, 6, 4)
        anchor, near, far = inputs = [keras.Input((WIDTH,)) for _ in range(3)]
        distances = [
            ops.sum(ops.square(embed(anchor) - embed(one)), axis=-1) for one in (near, far)
        ]
        self.siamese = keras.Model(inputs, distances)

    def phases(self, x):
        def loss():
            near, far = self.siamese((x["row"], x["near"], x["far"]))
            return ops.mean(ops.maximum(near - far + 0.5, 0))

        return {"loss": ([self.siamese], loss)}


class MetricLearning(Vectors):
    def __init__(self):
        super().__init__()
        self.embed = mlp(WIDTH, 6, 4)

    def phases(self, x):
        def loss():
            return contrast(cosine(self.embed(x["row"]), self.embed(x["near"])))

        return {"loss": ([self.embed], loss)}


class DualEncoder(Images):
    """An encoder of images and one of words, compared over the batch."""

    @staticmethod
    def data(rng, count):
        return {**Images.data(rng, count), "words": rng.integers(1, 9, (count, 3))}

    def __init__(self):
        super().__init__()
        self.images = to_vector(4)
        self.words = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(9, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(4),
            ]
        )

    def phases(self, x):
        def loss():
            return contrast(cosine(self.words(x["words"]), self.images(x["image"])))

        return {"loss": ([self.images, self.words], loss)}
