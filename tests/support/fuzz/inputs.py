"""Inputs: symbolic ones, and data with values that saturate, repeat and mask."""

from __future__ import annotations

import random

from .case import Make, Part, Source
from .catalogue import ON_JAX

_SHAPES = {
    "vector": ["6"],
    "sequence": ["5, 4"],
    "image": ["6, 6, 2", "5, 7, 3"],
    "volume": ["4, 4, 4, 2"],
    "film": ["3, 4, 4, 4, 2"],
    "wave": ["64"],
    "stereo": ["64, 2"],
}
_FLAVOURS = [
    "{normal}",
    "{normal}",
    "{normal} * 100",
    "{normal} * 1e-3",
    "np.exp(2 * {normal})",
    "np.repeat({normal}[:1], rows, axis=0)",
    "np.round({normal})",
    "{normal} * (rng.random(size=({size})) < 0.3)",
    "np.where(np.arange(rows).reshape(-1, {ones}) % 3 == 1, 30.0, 1.0) * {normal}",
    "np.zeros(({size}))",
]
_TOKENS = [
    "rng.integers(0, 12, size=(rows, {t}))",
    "rng.integers(1, 12, size=(rows, {t})) * (np.arange({t}) < rng.integers(1, 6, size=(rows, 1)))",
    "rng.integers(1, 12, size=(rows, {t})) * (np.arange({t}) < rng.integers(0, 3, size=(rows, 1)))",
    "np.repeat(rng.integers(0, 12, size=(1, {t})), rows, axis=0)",
    "rng.integers(0, 2, size=(rows, {t}))",
]
_WORDS = "['red', 'green', 'blue', 'sky']"


def draw_source(rng: random.Random, kind: str) -> tuple[Source, tuple[Part, ...]]:
    """An input of a kind, and the parts that make a tensor of that kind from it."""
    if kind == "sequence" and rng.random() < 0.4:
        masks = rng.choice(["True", "False"])
        given = (
            ("", "12"),
            ("", "4"),
            ("embeddings_initializer", "'normal'"),
            ("mask_zero", masks),
        )
        embedding = Make("layers.Embedding", given)
        return _tokens(rng), (Part((embedding,)),)
    if kind in _SHAPES:
        return _floats(rng, rng.choice(_SHAPES[kind])), ()
    return _OTHERS[kind](rng), ()


def _floats(rng: random.Random, shape: str) -> Source:
    size = f"rows, {shape}"
    normal = f"rng.normal(size=({size}))"
    ones = ", ".join(["1"] * len(shape.split(",")))
    data = rng.choice(_FLAVOURS).format(normal=normal, size=size, ones=ones)
    return Source(f"keras.Input(({shape},))", data, normal)


def _tokens(rng: random.Random) -> Source:
    length = rng.choice([5, 5, 2, 3, 8])
    data, plain = (text.format(t=length) for text in (rng.choice(_TOKENS), _TOKENS[0]))
    return Source(f"keras.Input(({length},), dtype='int32')", data, plain)


def _photos(rng: random.Random) -> Source:
    data = ["rng.uniform(0, 255, size=(rows, 8, 8, 3))", "rng.uniform(size=(rows, 8, 8, 3))"]
    return Source("keras.Input((8, 8, 3))", rng.choice(data), data[0])


def _strings(rng: random.Random) -> Source:
    data = f"tf.constant(rng.choice({_WORDS}, size=(rows, 2)))"
    return Source("keras.Input((2,), dtype='string')", data)


def _texts(rng: random.Random) -> Source:
    lengths = rng.choice(["rng.integers(1, 6, rows)", "np.arange(rows) % 7 + 1"])
    text = f"' '.join(rng.choice({_WORDS}, size=k))"
    return Source("keras.Input((), dtype='string')", f"tf.constant([{text} for k in {lengths}])")


def _category(rng: random.Random) -> Source:
    return Source("keras.Input((1,), dtype='int32')", "rng.integers(0, 12, size=(rows, 1))")


_OTHERS = {
    "tokens": _tokens,
    "photo": _photos,
    "strings": _strings,
    "texts": _texts,
    "category": _category,
}


def draw_sparse(rng: random.Random) -> tuple[Source, tuple[Part, ...]]:
    """Rows as SciPy matrices."""
    data = "rng.normal(size=(rows, 12)) * (rng.random(size=(rows, 12)) < 0.3)"
    activation = (("activation", rng.choice(["'tanh'", "'relu'", "'linear'"])),)
    dense = Make("layers.Dense", (("units", "4"), *activation))
    return Source("keras.Input((12,), sparse=True)", data), (Part((dense,)),)


def draw_ragged(rng: random.Random) -> tuple[Source, tuple[Part, ...]]:
    """Rows of unequal length, on TensorFlow."""
    assert not ON_JAX
    width = rng.randint(1, 7)
    lengths = rng.choice(["[2] * rows", "list(range(1, rows + 1))", "list(range(rows, 0, -1))"])
    values = f"rng.normal(size=(sum({lengths}), {width}))"
    data = f"tf.RaggedTensor.from_row_lengths({values}, {lengths})"
    pad = rng.choice(["x.to_tensor()", f"x.to_tensor(shape=(None, 9, {width}))"])
    mean = Make("Apply", (("", f"lambda x: ops.mean({pad}, axis=1)"),))
    return Source(f"keras.Input((None, {width}), ragged=True)", data), (Part((mean,)),)


def draw_source_like(rng: random.Random, source: Source) -> Source:
    """Another input of floats of the same shape."""
    shape = source.symbol.removeprefix("keras.Input((").removesuffix(",))")
    return _floats(rng, shape)


def draw_data(rng: random.Random, source: Source) -> str:
    """Other data for an input: of another flavour if there are some."""
    if source.symbol.startswith("keras.Input((") and source.plain.startswith("rng.normal("):
        return _floats(rng, source.symbol.removeprefix("keras.Input((").removesuffix(",))")).data
    if source.plain.startswith("rng.integers(0, 12"):
        length = source.symbol.removeprefix("keras.Input((").partition(",")[0]
        return rng.choice(_TOKENS).format(t=length)
    return source.data
