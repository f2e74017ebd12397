"""A case of a rule: a function of rows, and how its rows, sizes, types and axes are drawn."""

import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

DTYPES = {
    "d": tf.float64,
    "f": tf.float32,
    "h": tf.float16,
    "p": tf.float64,  # positive
    "i": tf.int32,
    "l": tf.int64,
    "b": tf.bool,
    "c": tf.complex128,
    "s": tf.string,
}
ANY = "dfil"  # the types of which `n`, any number, is drawn
SIZES = (1, 2, 3, 4, 5, 7)  # some are those of batches
_SIZE = re.compile(r"(\d*)([a-z]?)\+?(\d*)")


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, called with a tensor for each entry of `data`.

    Attributes:
        type: the operation that has to be spread.
        function: gives tensors.
        data: a tensor's sizes, `B` for the batch's rows, and after a colon its type, one letter
            of `DTYPES`, or `n` for any number, for integers followed by their limit. Without `B`
            it is the same for all batches. A small letter is a size that `TEST_DRAW` draws, the
            same wherever the case has it: `n`, `2n`, `n+1`.
        axis: the function also gets an axis of its first tensor, which `TEST_DRAW` draws: "any",
            or one "beside" the rows.
        traceless: whether the rule leaves no record: it passes on values, or makes them anew.
        is_compilable: whether XLA compiles it, and gives the same numbers.
        whole: other operations that may be computed whole, on gathered rows.
        tolerance: relative, and of the size of one.
    """

    type: str
    function: Callable
    data: tuple[str, ...]
    traceless: bool = False
    is_compilable: bool = True
    has_gradient: bool = True
    whole: tuple[str, ...] = ()
    tolerance: float = 1e-10
    axis: str = ""

    @functools.cached_property
    def drawn(self):
        """What stands for the letters of `data`: sizes, `type` for any number, and `axis`."""
        words = f"{self.type} {self.data} {self.axis}"
        rng = np.random.default_rng(
            [int(os.environ.get("TEST_DRAW", 0)), zlib.crc32(words.encode())]
        )
        found = {one: int(rng.choice(SIZES)) for one in "abcdefghijklmnopqrstuvwxyz"}
        first = self.data[0].partition(":")[0].split()
        axes = [n for n, size in enumerate(first) if self.axis == "any" or size != "B"]
        axes += [n - len(first) for n in axes]
        return {**found, "type": str(rng.choice([*ANY])), "axis": int(rng.choice(axes or [0]))}

    def size(self, text):
        """The number that a text stands for."""
        factor, letter, more = _SIZE.fullmatch(text).groups()
        if not letter:
            return int(text)
        return int(factor or 1) * self.drawn[letter] + int(more or 0)

    @functools.cached_property
    def specs(self):
        """(sizes, dtype, letter, limit) of each tensor."""
        found = []
        for text in self.data:
            sizes, _, kind = text.partition(":")
            kind = (self.drawn["type"] if kind[:1] == "n" else kind[:1] or "d") + kind[1:]
            shape = [size if size == "B" else self.size(size) for size in sizes.split()]
            found.append((shape, DTYPES[kind[0]], kind[0], self.size(kind[1:] or "5")))
        return found

    def __str__(self):
        shapes = [(shape, dtype.name) for shape, dtype, *_ in self.specs]
        axis = f" axis {self.drawn['axis']}" if self.axis else ""
        return f"{self.type} {self.data} {shapes}{axis} TEST_DRAW={os.environ.get('TEST_DRAW', 0)}"

    def rows(self, batch, seed=0):
        """The tensors of a batch that have rows, the axis of rows first."""
        return [self._draw(n, batch, seed) for n, spec in enumerate(self.specs) if "B" in spec[0]]

    def wholes(self):
        """The other tensors, by their numbers."""
        return {n: self._draw(n, 0) for n, spec in enumerate(self.specs) if "B" not in spec[0]}

    def _draw(self, number, batch, seed=0):
        shape, dtype, letter, limit = self.specs[number]
        rng = np.random.default_rng(
            [zlib.crc32(self.type.encode()), number, batch, seed][: 3 + bool(seed)]
        )
        shape = [batch, *[size for size in shape if size != "B"]] if "B" in shape else shape
        if letter in "il":
            return tf.constant(rng.integers(0, limit, shape), dtype)
        if letter == "b":
            return tf.constant(rng.random(shape) < 0.5)
        if letter == "s":
            words = np.array(["QQ==", " Rg== ", "ab c", "", "12", "1.5"])[:limit]
            return tf.constant(words[rng.integers(0, len(words), shape)])
        values = rng.normal(size=shape)
        if letter == "p":
            values = 0.1 + 0.8 * rng.random(shape)
        if letter == "c":
            values = values + 1j * rng.normal(size=shape)
        return tf.constant(values, dtype)

    def step(self, is_drawn=False):
        """The function of a batch's rows, which gives results, and their gradients.

        With `is_drawn`, all tensors but the first are random numbers that the step draws.
        """
        wholes, specs = self.wholes(), self.specs

        def placed(rows):
            rest = iter([rows[0], *map(_drawn, rows[1:])] if is_drawn else rows)
            return [
                wholes[n] if n in wholes else _moved(next(rest), specs[n][0])
                for n in range(len(specs))
            ]

        return self._differentiated(placed, self.rows(2), list(wholes.values()))

    def of_joined(self):
        """As `step`, of the rows of two batches, which it joins."""
        step = self.step()

        def joined(*rows):
            half = len(rows) // 2
            return step(*map(_joined, rows[:half], rows[half:]))

        return joined

    def split_elsewhere(self, number, axis, batch=4):
        """A function of one tensor that is split along any axis, and that tensor."""
        wholes, rows = self.wholes(), iter(self.rows(batch))
        tensors = [
            wholes[n] if n in wholes else _moved(next(rows), shape)
            for n, (shape, *_) in enumerate(self.specs)
        ]
        order = [axis, *(one for one in range(len(tensors[number].shape)) if one != axis)]
        back = [order.index(one) for one in range(len(order))]
        given = tf.transpose(tensors[number], order)

        def placed(rows):
            return [
                tf.transpose(rows[0], back) if n == number else tensor
                for n, tensor in enumerate(tensors)
            ]

        return self._differentiated(placed, [given], []), given

    def _differentiated(self, placed, sample, more):
        """A function that gives results, and their gradients if TensorFlow has them."""

        def results(*rows):
            made = self.function(*placed(rows), *([self.drawn["axis"]] if self.axis else []))
            return [made] if tf.is_tensor(made) else list(made)

        def with_gradients(*rows):
            watched = [one for one in (*rows, *more) if one.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                made = results(*rows)
            outputs = [one for one in made if one.dtype.is_floating]
            found = tape.gradient(
                outputs, watched, [tf.cos(one) for one in outputs], unconnected_gradients="zero"
            )
            return made, [tf.convert_to_tensor(one) for one in found]

        if not self.has_gradient:
            return results
        try:
            with_gradients(*sample)
        except LookupError:  # TensorFlow has no gradient for it
            return results
        return with_gradients


def _drawn(rows):
    """Random numbers of the same sizes, that each device can draw for its rows."""
    sizes = tf.shape(rows)
    if rows.dtype.is_integer:
        return tf.random.stateless_uniform(sizes, [3, 4], 0, 2, rows.dtype)
    if rows.dtype.is_floating:
        return tf.random.stateless_uniform(sizes, [3, 4], dtype=rows.dtype)
    return tf.cast(tf.ones(sizes, tf.int32), rows.dtype)


def _joined(rows, others):
    """Rows, and behind them twice as many."""
    twice = tf.reshape(tf.stack([others, rows], 1), [-1, *rows.shape[1:]])
    return tf.concat([rows, twice], 0)


def _moved(rows, shape):
    """The tensor with the axis of rows where the case wants it."""
    axis = shape.index("B")
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    return rows if axis == 0 else tf.transpose(rows, order)


def case(kind, function, *data, **settings):
    """A case."""
    return Case(kind, function, data, **settings)
