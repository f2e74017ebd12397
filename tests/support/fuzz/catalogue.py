"""The layers, the kinds of tensors that each takes, and how to call it."""

from __future__ import annotations

import inspect
import random

import keras

from . import extra, values
from .case import Make, Part

ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:  # where random layers draw what one device draws
    for argument in ("rate", "dropout", "recurrent_dropout", "stddev"):
        values.BY_NAME[argument] = ["0.0", "0.3"]

REASONS = {
    "Layer": "the base class",
    "Wrapper": "a base class without a call of its own",
    "InputLayer": "drawn as keras.Input",
    "InputSpec": "no layer",
    "TFSMLayer": "needs a SavedModel, and has no gradient of Keras's",
    "TorchModuleWrapper": "for the torch backend",
    "FlaxLayer": "needs Flax",
    "JaxLayer": "runs on its own backend only, as a function of the user's",
    "MaxNumBoundingBoxes": "changes boxes, which no model of ours has",
    "CutMix": "mixes images with their labels: for data pipelines",
    "MixUp": "mixes images with their labels: for data pipelines",
}
_TENSORFLOW_ONLY = {"StringLookup", "TextVectorization", "HashedCrossing", "Hashing"}
_UNTRACED = [f"Adaptive{how}Pooling{rank}D" for how in ("Average", "Max") for rank in (1, 2, 3)]
# Drawn for one of a hundred: tracing them takes minutes, as long as a hundred other models.
SLOW = {"AugMix", "Equalization", "RandAugment"} if ON_JAX else set()
_ANY = ("vector", "sequence", "image")
_KINDS = {
    "AdditiveAttention": ("sequence",),
    "Attention": ("sequence",),
    "Bidirectional": ("sequence",),
    "CategoryEncoding": ("tokens",),
    "ConvLSTM1D": ("image",),
    "ConvLSTM2D": ("volume",),
    "ConvLSTM3D": ("film",),
    "Discretization": ("vector",),
    "Dot": ("vector", "sequence"),
    "EinsumDense": ("vector", "sequence"),
    "Embedding": ("tokens",),
    "GRU": ("sequence",),
    "GRUCell": ("sequence",),
    "GroupQueryAttention": ("sequence",),
    "HashedCrossing": ("category",),
    "Hashing": ("tokens", "strings"),
    "IntegerLookup": ("tokens",),
    "LSTM": ("sequence",),
    "LSTMCell": ("sequence",),
    "Masking": ("sequence",),
    "MelSpectrogram": ("wave",),
    "MultiHeadAttention": ("sequence",),
    "Permute": ("sequence", "image"),
    "Pipeline": ("vector", "image"),
    "RNN": ("sequence",),
    "RepeatVector": ("vector",),
    "ReversibleEmbedding": ("tokens",),
    "STFTSpectrogram": ("stereo",),
    "SimpleRNN": ("sequence",),
    "SimpleRNNCell": ("sequence",),
    "StackedRNNCells": ("sequence",),
    "StringLookup": ("strings",),
    "TextVectorization": ("texts",),
    "TimeDistributed": ("sequence", "image"),
    # Of this package:
    "Positions": ("sequence",),
    "Shared": ("tokens",),
    "Chooses": ("vector", "sequence"),
    "Repeats": ("vector",),
    "Rows": ("vector", "sequence"),
}
_MERGING = ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
_FORMS = {
    "Attention": ("{0}([x, x])", "{0}([x, 2 * x, x])", "{0}([x, x], use_causal_mask=True)"),
    "AdditiveAttention": ("{0}([x, x])", "{0}([x, 2 * x, x])"),
    "Dot": ("{0}([x, x * x])",),
    "GroupQueryAttention": ("{0}(x, x)", "{0}(x, x, use_causal_mask=True)"),
    "HashedCrossing": ("{0}([x, x + 1])",),
    "MultiHeadAttention": ("{0}(x, x)", "{0}(x, x, use_causal_mask=True)"),
    "ReversibleEmbedding": ("{0}(x)", "{0}({0}(x), reverse=True)"),
}
_FLOAT_KINDS = {2: "vector", 3: "sequence", 4: "image", 5: "volume", 6: "film"}


def all_layers() -> dict[str, type | None]:
    """All of Keras's layers, and those of this package (with no class), by name."""
    own = [name for name in extra.NAMES if name[0].isupper()]
    return {**values.classes(keras.layers), **dict.fromkeys(own)}


def undrawable() -> dict[str, str]:
    """The layers that are not drawn, with the reason."""
    reasons = {name: REASONS[name] for name in all_layers() if name in REASONS}
    if ON_JAX:
        reasons.update(dict.fromkeys(_TENSORFLOW_ONLY, "runs in TensorFlow's data pipelines only"))
    else:
        found = [name for name in _UNTRACED if name in all_layers()]
        reasons.update(dict.fromkeys(found, "TensorFlow fails or crashes when it traces it"))
    return reasons


def drawable() -> list[str]:
    """The names of the layers that are drawn."""
    return [name for name in all_layers() if name not in undrawable()]


def kinds(name: str) -> tuple[str, ...]:
    """The kinds of tensors that a layer takes."""
    made = all_layers()[name]
    if name in _KINDS:
        return _KINDS[name]
    if made is None:
        return _ANY
    if "image_preprocessing" in made.__module__:
        return ("photo",)
    ends = {"1D": "sequence", "2D": "image", "3D": "volume"}
    # "Conv3D" and "Conv3DTranspose" alike.
    return next(((kind,) for end, kind in ends.items() if end in name), _ANY)


def kind_of(tensor: keras.KerasTensor) -> str | None:
    """The kind of a tensor within a model; `None` if no layer is drawn for it."""
    if None in tensor.shape[1:] or tensor.shape[0] is not None:
        return None
    if not keras.backend.is_float_dtype(tensor.dtype):
        return "tokens" if "int" in tensor.dtype and len(tensor.shape) == 2 else None
    return _FLOAT_KINDS.get(len(tensor.shape))


def fitting(kind: str | None) -> list[str]:
    """The layers that take a kind of tensors."""
    return [name for name in drawable() if kind in kinds(name)]


def draw_part(rng: random.Random, name: str, shape: tuple[int | None, ...]) -> Part:
    """A layer of this name for a tensor of this shape, and its call.

    Raises:
        LookupError: if the table of values lacks a required argument.
    """
    made = all_layers()[name]
    if made is None:
        return Part((_own(rng, name),))
    make = _with_inner(rng, name, values.draw(rng, made, "layers"), shape)
    if rng.random() < 0.1 and _takes_activity_regularizer(made):
        make = Make(make.name, (*make.arguments, ("activity_regularizer", "'l2'")))
    form = _form(rng, name, made)
    if name in _MERGING:
        dense = Make("layers.Dense", (("", str(shape[-1])), ("activation", "'tanh'")))
        return Part((make, dense), "{0}([x, {1}(x)])")
    return Part((make,), form, frozen=rng.random() < 0.06)


def _form(rng: random.Random, name: str, made: type) -> str:
    if name in _FORMS:
        return rng.choice(_FORMS[name])
    parameters = inspect.signature(made.__init__).parameters
    is_random = "seed" in parameters and not {"rate", "dropout", "stddev"} & set(parameters)
    if is_random and not ON_JAX:  # on TensorFlow replicas draw other numbers
        return "{0}(x, training=False)"
    return rng.choices(
        ["{0}(x)", "{0}(x) + {0}(2 * x)", "ops.concatenate([x, {0}(x)], axis=-1)"], [10, 1, 1]
    )[0]


def _takes_activity_regularizer(made: type) -> bool:
    return "activity_regularizer" not in inspect.signature(made.__init__).parameters


def _own(rng: random.Random, name: str) -> Make:
    """A layer of this package, with its function."""
    table = {"AddsLoss": extra.LOSSES, "Keeps": extra.UPDATES, "Apply": extra.FUNCTIONS}
    arguments = [("", rng.choice(table[name]))] if name in table else []
    if name == "Keeps":
        options = {"first": ["1e6", "1.0"], "dtype": ["'float32'", "'int32'"], "used": ["True"]}
        arguments += [(key, rng.choice(v)) for key, v in options.items() if rng.random() < 0.3]
    return Make(name, tuple(arguments))


def _inner(rng: random.Random, name: str, shape: tuple[int | None, ...]) -> str | None:
    """The layer within a wrapper, as text."""

    def one(*names: str) -> str:
        name = rng.choice(names)
        return str(values.draw(rng, all_layers()[name], "layers"))

    if name == "Bidirectional":
        return one("GRU", "LSTM", "SimpleRNN")
    if name == "TimeDistributed":
        return one("Dense", "LayerNormalization") if len(shape) == 3 else one("Conv1D", "GRU")
    if name == "SpectralNormalization":
        return one("Dense") if len(shape) < 4 else one("Conv2D", "Dense")
    if name == "RNN":
        return one("GRUCell", "LSTMCell", "SimpleRNNCell")
    return None


def _with_inner(rng: random.Random, name: str, make: Make, shape: tuple[int | None, ...]) -> Make:
    """Adds a fitting layer to a wrapper, and the layer that runs it to a cell."""
    if name.endswith(("Cell", "Cells")):
        outer = values.draw(rng, keras.layers.RNN, "layers")
        rest = tuple(pair for pair in outer.arguments if pair[0] != "cell")
        return Make(outer.name, (("cell", str(make)), *rest))
    if name == "EinsumDense":
        given = {"equation": "'ab,bc->ac'", "output_shape": "3"}
        if len(shape) == 3:
            given = {"equation": "'abc,cd->abd'", "output_shape": "(None, 3)"}
        rest = tuple(pair for pair in make.arguments if pair[0] not in given)
        return Make(make.name, (*given.items(), *rest))
    inner = _inner(rng, name, shape)
    if inner is None:
        return make
    rest = tuple(pair for pair in make.arguments if pair[0] not in ("layer", "cell"))
    return Make(make.name, (("cell" if name == "RNN" else "layer", inner), *rest))
