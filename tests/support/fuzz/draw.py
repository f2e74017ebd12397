"""Draws a case: a layer of interest, the layers before and after it, and a training."""

from __future__ import annotations

import random
import warnings
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from . import catalogue, extra, heads, inputs, settings
from .case import Case, Make, Part, Source

_ATTEMPTS = 60


class UndrawableError(Exception):
    """The drawn parts don't fit together."""


def namespace() -> dict[str, Any]:
    """The names that a case's text uses."""
    names = {"keras": keras, "layers": layers, "ops": ops, "np": np}
    if not catalogue.ON_JAX:
        import tensorflow as tf

        names["tf"] = tf
    return {**names, **{name: getattr(extra, name) for name in extra.NAMES}}


def draw_case(seed: int, index: int, modes: tuple[str, ...] = ("data",), layer: str = "") -> Case:
    """The case of a seed and an index.

    Args:
        seed: the run's seed.
        index: the case's number.
        modes: the modes of `make_parallel` to draw from.
        layer: the layer of interest; drawn if empty.

    Raises:
        UndrawableError: if no fitting combination was found.
    """
    backend = keras.backend.backend()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.backend.clear_session(free_memory=False)
    rng = random.Random(f"{backend} {seed} {index}")
    reason = ""
    for _ in range(_ATTEMPTS):
        name = layer or rng.choice(catalogue.drawable())
        if not layer and name in catalogue.SLOW and rng.random() < 0.99:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _draw(rng, f"{backend}-{seed}-{index}", name, rng.choice(modes))
        except (UndrawableError, LookupError) as error:
            reason = f"{name}: {error}"
    raise UndrawableError(reason)


def _draw(rng: random.Random, name: str, layer: str, mode: str) -> Case:
    kind = rng.choice(catalogue.kinds(layer))
    sources, start, trunk, how = _inputs(rng, kind)
    names = namespace()
    symbols = [eval(source.symbol, names) for source in sources]
    x = eval(start, names, {"i": _packed(how, symbols)})
    x = _after(x, trunk, names)
    if kind == catalogue.kind_of(x) and rng.random() < 0.3:
        x, trunk = _grow(rng, x, trunk, names, keep=kind)
    x, trunk = _grow(rng, x, trunk, names, layer)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        x, trunk = _grow(rng, x, trunk, names)
    x, trunk = _to_head(rng, x, trunk, names)
    found = [heads.draw_head(rng, x.shape) for _ in range(rng.choice([1, 1, 1, 1, 2]))]
    for head in found:
        _after(x, head.parts, names)
    case = Case(name, sources, start, trunk, tuple(found), inputs=how, mode=mode)
    return settings.draw_training(rng, case)


def _inputs(rng: random.Random, kind: str) -> tuple[tuple[Source, ...], str, tuple[Part, ...], str]:
    """Inputs, their first tensor, layers that make a tensor of the kind, and their structure."""
    draw = rng.random()
    if kind == "vector" and draw < 0.06:
        source, parts = inputs.draw_sparse(rng)
        return (source,), "i", parts, "single"
    if kind == "vector" and draw < 0.1 and not catalogue.ON_JAX:
        source, parts = inputs.draw_ragged(rng)
        return (source,), "i", parts, "single"
    source, parts = inputs.draw_source(rng, kind)
    if draw < 0.85 or kind not in ("vector", "sequence") or "int32" in source.symbol:
        return (source,), "i", parts, "single"
    how = rng.choice(["list", "dict"])
    one, two = ("i[0]", "i[1]") if how == "list" else ("i['i0']", "i['i1']")
    form = rng.choice(["{0} + 2 * {1}", "ops.concatenate([{0}, {1}], axis=-1)", "{0} * {1}"])
    return (source, inputs.draw_source_like(rng, source)), form.format(one, two), parts, how


def _packed(how: str, symbols: list[Any]) -> Any:
    if how == "single":
        return symbols[0]
    return symbols if how == "list" else {f"i{k}": symbol for k, symbol in enumerate(symbols)}


def _after(x: Any, parts: tuple[Part, ...], names: dict[str, Any]) -> Any:
    """The symbolic tensor after some parts."""
    for part in parts:
        try:
            made = [eval(str(make), names) for make in part.makes]
            text = part.form.format(*(f"made[{k}]" for k in range(len(made))))
            x = eval(text, {**names, "made": made, "x": x})
        except Exception as error:  # Keras may raise anything if parts don't fit
            raise UndrawableError(f"{part.makes[0]}: {error!r}"[:300]) from error
        if not hasattr(x, "shape") or not len(x.shape) or x.shape[0] is not None:
            raise UndrawableError(f"{part.makes[0]}: gives no rows")
    return x


def _grow(
    rng: random.Random,
    x: Any,
    trunk: tuple[Part, ...],
    names: dict[str, Any],
    layer: str = "",
    keep: str = "",
) -> tuple[Any, tuple[Part, ...]]:
    """One more part: a layer of this name, a layer that fits, or one that keeps the kind."""
    kind = catalogue.kind_of(x)
    for _ in range(1 if layer else 6):
        choices = [layer] if layer else catalogue.fitting(kind)
        if not choices:
            return x, trunk
        part = catalogue.draw_part(rng, rng.choice(choices), tuple(x.shape))
        try:
            after = _after(x, (part,), names)
        except UndrawableError:
            if layer:
                raise
            continue
        if not keep or catalogue.kind_of(after) == keep:
            return after, (*trunk, part)
    return x, trunk


def _to_head(
    rng: random.Random, x: Any, trunk: tuple[Part, ...], names: dict[str, Any]
) -> tuple[Any, tuple[Part, ...]]:
    """Floats of two axes, or of three for a sequence of targets."""
    if not keras.backend.is_float_dtype(x.dtype):
        if "int" not in x.dtype:
            raise UndrawableError(f"ends in {x.dtype}")
        embedding = Make("layers.Embedding", (("", "60"), ("", "3")))
        trunk, x = (*trunk, Part((embedding,))), _after(x, (Part((embedding,)),), names)
    rank = len(x.shape)
    is_static = None not in x.shape[1:]
    if rank == 2 or (rank == 3 and is_static and rng.random() < 0.3):
        return x, trunk
    choices = ["layers.Flatten()"] if is_static else []
    if rank in (3, 4, 5):
        choices += [f"layers.Global{how}Pooling{rank - 2}D()" for how in ("Average", "Max")]
    if rank == 3 and rng.random() < 0.2:  # a recurrent layer takes three times as long as others
        choices += ["layers.LSTM(3)"]
    if not choices:
        raise UndrawableError(f"ends in {x.shape}")
    name, _, rest = rng.choice(choices).partition("(")
    given = (("", rest[:-1]),) if rest != ")" else ()
    part = Part((Make(name, given),))
    return _after(x, (part,), names), (*trunk, part)
