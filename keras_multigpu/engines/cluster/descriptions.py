"""What a process tells the others of itself, its models and arrays: short texts and checksums."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import random
import socket
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

COMPARED = 1024
"""How many elements of each array in a batch the processes compare."""

_LOOPS = ("training", "evaluating", "predicting")
# What a process may have called by itself: the template's `predict`, say.
_OWN_AFFAIRS = frozenset(
    ["name", "built", *(f"stop_{loop}" for loop in _LOOPS)]
    + [f"{kind}_function" for kind in ("train", "test", "predict")]
)


def describe_process(count: int, data: str, **facts: str) -> dict[str, str]:
    """What the others are told of this process, `facts` of the backend included."""
    states = (random.getstate(), np.random.get_state(legacy=False))
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "num_processes": str(count),
        "data": data,
        "Keras": keras.__version__,
        "keras_multigpu": importlib.metadata.version("keras-multigpu"),
        # A checksum: equal in processes that have set the same seed.
        "random numbers": str(zlib.crc32(repr(states).encode())),
        "seed": str(random.SystemRandom().randrange(2**31)),
        **facts,
    }


def digest_of(arrays: Sequence[Any], count: int) -> int:
    """A 31-bit checksum of arrays: shapes, types, and about `count` values of each."""
    digest = 0
    for leaf in arrays:
        array = np.asarray(leaf)
        some = array.reshape(-1)[:: max(1, array.size // count)]
        digest = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), digest)
        digest = zlib.crc32(some.tobytes(), digest)
    return digest >> 1


def describe(model: keras.Model) -> str:
    """A checksum of a model's layers, its optimizer, and its weights: shapes, which are trained."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    known = (
        type(model).__qualname__,
        [_settings(layer) for layer in model._flatten_layers()],
        [(tuple(one.shape), str(one.dtype), one.trainable) for one in variables],
        _settings(optimizer),
        _schedule(optimizer),
    )
    return f"{type(model).__name__} {_checksum(known)}"


def describe_compiled(model: keras.Model) -> str:
    """A checksum of a model's loss, its metrics, and how its steps run."""
    # Keras keeps here what its own `compile` got.
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    named = ("loss", "loss_weights", "metrics", "weighted_metrics")
    forms = [(name, _form(config.get(name))) for name in named]
    ways = model.run_eagerly, model.jit_compile, model.steps_per_execution
    return _checksum((ways, forms))


def _checksum(known: Any) -> str:
    return f"of checksum {zlib.crc32(repr(known).encode()):08x}"


def _settings(part: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The class of a layer or optimizer, and its plain settings."""
    kept = []
    if isinstance(part, keras.Layer):
        kept.append(("dtype_policy", part.dtype_policy.name))
    for name, value in sorted(vars(part).items()) if part is not None else ():
        if name.startswith("_") or name in _OWN_AFFAIRS:
            continue
        if _is_plain(value):
            kept.append((name, repr(value)))
        elif callable(value) and hasattr(value, "__name__"):
            kept.append((name, value.__name__))
        elif isinstance(value, (keras.Loss, keras.Optimizer)):
            kept.append((name, repr(_form(value))))
    return type(part).__qualname__, kept


def _schedule(optimizer: Any) -> Any:
    """The settings of a schedule of learning rates; a rate alone is compared with the weights."""
    rate = getattr(optimizer, "_learning_rate", None)
    return _settings(rate) if isinstance(rate, LearningRateSchedule) else None


def _form(value: Any) -> Any:
    """A loss or a metric, or several: classes, names of functions, settings."""
    if value is None or _is_plain(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_form(one) for one in value]
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_form(value[key]))) for key in value)
    if isinstance(value, functools.partial):
        return _form(value.func), _form(value.args), _form(value.keywords)
    if isinstance(value, types.FunctionType):
        cells = _cells(value)
        own = [one for one in value.__code__.co_consts if isinstance(one, float)]
        given = [one for one in (*cells, *(value.__defaults__ or ())) if _is_plain(one)]
        return value.__name__, own, given
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if not hasattr(value, "__dict__"):
        return type(value).__qualname__
    given = vars(value).get("_fn_kwargs")  # of a function that Keras wraps
    return _settings(value), _form(given)


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function knows from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # no value yet
            found.append(cell.cell_contents)
    return found


def _is_plain(value: Any) -> bool:
    """Whether `repr` gives the same text in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))
