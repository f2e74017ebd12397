"""What a process tells the others of its model: layers, weights, optimizer, loss and metrics."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import sys
import sysconfig
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from keras_multigpu.engines.cluster.descriptions import digest_of

Facts = Sequence[Sequence[str]]
"""Pairs: a part of a model, by its name; and what is equal in processes that build the same."""

_LOOPS = ("training", "evaluating", "predicting")
# What a process may have called by itself (the template's `predict`, say), and automatic names.
_OWN_AFFAIRS = frozenset(
    [
        "name",
        "output_names",
        "built",
        "compiled",
        "is_awq_calibrated",
        "fit",
        "train_on_batch",
        *(f"stop_{loop}" for loop in _LOOPS),
    ]
    + [f"{kind}_function" for kind in ("train", "test", "predict")]
)
# Steps may name globals of a process's own: who prints, who writes.
_STEPS = frozenset(f"{kind}_step" for kind in ("train", "test", "predict"))
# Settings that are objects. (Initializers may have seeds of a process's own.)
_DESCRIBED = (
    keras.Loss,
    keras.Optimizer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    functools.partial,
    types.FunctionType,
    types.MethodType,
)
_WITH_SETTINGS = (*_DESCRIBED, keras.Metric, LearningRateSchedule)
# The objects that are being described, which may refer to themselves.
_WITHIN: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "within", default=frozenset()
)
_LIBRARIES = frozenset(["builtins", "jax", "keras", "keras_multigpu", "numpy", "tensorflow"])
# Attributes of Keras's own, which may differ: what was called, say.
_KERAS_OWN = frozenset([*vars(keras.layers.Layer()), *vars(keras.Model())])
_INSTALLED = "-packages"  # in the paths of what pip installs
_LONGEST = 120  # characters of a fact that people see


def facts_of_model(model: keras.Model) -> Facts:
    """A model's layers, its optimizer, and its weights: shapes, which are trained."""
    optimizer = getattr(model, "optimizer", None)
    found = []
    for layer in model._flatten_layers():
        found += _facts(f"layer {layer.name!r}", layer)
    for one in [*model.variables, *(optimizer.variables if optimizer is not None else ())]:
        known = tuple(one.shape), str(one.dtype), "trained" if one.trainable else "not trained"
        found.append((f"variable {one.path!r}", " ".join(map(str, known))))
    found += _facts("the optimizer", optimizer)
    # A rate alone is compared with the weights.
    rate = getattr(optimizer, "_learning_rate", None)
    return found + _facts("the schedule", rate if isinstance(rate, LearningRateSchedule) else None)


def facts_of_compilation(model: keras.Model) -> Facts:
    """A model's loss, its metrics, and how its steps run."""
    # Keras keeps here what its own `compile` got.
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    forms = {
        name: _form(config.get(name))
        for name in ("loss", "loss_weights", "metrics", "weighted_metrics")
    }
    ways = ("run_eagerly", "jit_compile", "steps_per_execution")
    forms |= {way: getattr(model, way) for way in ways}
    forms |= {"floatx": keras.config.floatx(), "epsilon": keras.config.epsilon()}
    return [("", f"{key}={value!r}") for key, value in forms.items()]


def checksum(facts: Facts) -> str:
    """The facts in a few characters, without the names of parts, which may be automatic."""
    return f"{zlib.crc32(repr([what for _, what in facts]).encode()):08x}"


def difference(one: Facts, other: Facts) -> tuple[str, str]:
    """The first facts in which two processes differ."""
    for (where, its), (there, first) in itertools.zip_longest(one, other, fillvalue=("", "")):
        if its != first:
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(its, first))
            begin = max(len([*equal]) - _LONGEST // 2, 0)
            return _told(where, its, begin), _told(there, first, begin)
    return "the same", "the same"


def _told(where: str, what: str, begin: int) -> str:
    """A fact as people see it, from a place before the difference."""
    end = begin + _LONGEST
    what = f"{'...' if begin else ''}{what[begin:end]}{'...' if len(what) > end else ''}"
    return ": ".join(text for text in (where, what) if text) or "nothing there"


def _facts(where: str, part: Any) -> list[tuple[str, str]]:
    """The class of a layer or optimizer, its settings, and its own code."""
    if part is None:
        return []
    name, settings = _settings(part)
    code = [f"{key}: {form!r}" for key, form in _code(type(part))]
    return [(where, what) for what in (name, *(f"{k}={v}" for k, v in settings), *code)]


def _settings(part: Any) -> tuple[str, list[tuple[str, str]]]:
    """The class of a layer, an optimizer or a loss, and its settings."""
    kept = []
    if isinstance(part, keras.Layer):
        kept.append(("dtype_policy", part.dtype_policy.name))
    is_of_library, is_object = _is_in_library(type(part)), _is_function_like(part)
    for name, value in sorted(vars(part).items()):
        is_own = name in _KERAS_OWN or name.startswith("_self_")  # of Keras and TensorFlow
        is_private = name.startswith("_") and (is_of_library or is_own)
        if is_private or name in _OWN_AFFAIRS:
            continue
        if name.startswith("_") and not isinstance(value, float):
            continue  # what is counted or kept for later use
        if _is_plain(value):
            kept.append((name, repr(value)))
        elif _is_described(value) or (not is_object and _is_function_like(value)):
            kept.append((name, repr(_form(value))))
        elif callable(value) and hasattr(value, "__name__"):
            kept.append((name, value.__name__))
    return type(part).__qualname__, kept


def _code(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and plain values of a user's class."""
    for one in kind.__mro__:
        if _is_in_library(one):
            continue
        for name, value in sorted(vars(one).items()):
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)  # of a static method, or a class's
            if isinstance(value, types.FunctionType):
                yield name, _function(value, not_globals=name in _STEPS)
            elif not name.startswith("__") and (_is_plain(value) or _holds_plain(value)):
                yield name, _form(value)


def _is_in_library(kind: type) -> bool:
    """Whether a class is none of the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__.partition(".")[0] in _LIBRARIES or _INSTALLED in file


def _is_function_like(value: Any) -> bool:
    """Whether an object is a user's function with settings, or nothing but settings."""
    others = (keras.Layer, keras.Metric, keras.Initializer, type)
    if _is_in_library(type(value)) or isinstance(value, others):
        return False
    return dataclasses.is_dataclass(value) or callable(value)


def _form(value: Any) -> Any:
    """A loss or a metric, or several: classes, functions, settings."""
    if value is None or _is_plain(value):
        return value
    before = _WITHIN.get()
    if id(value) in before:
        return "itself"
    token = _WITHIN.set(before | {id(value)})
    try:
        return _form_of_parts(value)
    finally:
        _WITHIN.reset(token)


def _form_of_parts(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_form(one) for one in value]
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_form(value[key]))) for key in value)
    if isinstance(value, functools.partial):
        return _form(value.func), _form(value.args), _form(value.keywords)
    if isinstance(value, types.FunctionType):
        return _function(value)
    if isinstance(value, types.MethodType):
        own = getattr(value.__self__, "__dict__", {})
        return _form(value.__func__), {key: one for key, one in own.items() if _is_plain(one)}
    if _is_array(value):
        return digest_of([_numpy(value)], sys.maxsize)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if not isinstance(value, _WITH_SETTINGS) and not _is_function_like(value):
        return type(value).__qualname__
    name, settings = _settings(value)
    # Of a function that Keras wraps.
    wrapped = [_form(vars(value)[one]) for one in ("_fn", "_fn_kwargs") if one in vars(value)]
    return tuple(one for one in (name, dict(settings), *wrapped, *_code(type(value))) if one)


def _function(
    function: types.FunctionType, known: set[Any] | None = None, *, not_globals: bool = False
) -> Any:
    """A function's name, its code, and the plain values and functions of one's own that it names.

    `known` are those that are described already.
    """
    known = set() if known is None else known
    if _is_of_library(function):
        own = getattr(function, "__wrapped__", None)
        if not isinstance(own, types.FunctionType):
            return function.__name__
        return _function(own, known, not_globals=not_globals)
    if function in known:
        return function.__name__
    known.add(function)
    named = [] if not_globals else _names(function.__code__)
    globals_ = [function.__globals__[name] for name in named if name in function.__globals__]
    modules = [one for one in globals_ if isinstance(one, types.ModuleType) and _is_own(one)]
    globals_ += [vars(one)[name] for one in modules for name in named if name in vars(one)]
    # Whole numbers and texts may be a process's number, or its folder.
    values = [one for one in globals_ if isinstance(one, (float, types.FunctionType))]
    if not not_globals:
        values += [*_cells(function), *(function.__defaults__ or ())]
        values += (function.__kwdefaults__ or {}).values()
    given = []
    for one in values:
        if isinstance(one, types.FunctionType):
            given.append(_function(one, known, not_globals=not_globals))
        elif _is_plain(one) or _holds_plain(one) or _is_array(one):
            given.append(_form(one))
    return function.__name__, given, _code_digest(function.__code__)


def _is_of_library(function: types.FunctionType) -> bool:
    is_named = (function.__module__ or "").partition(".")[0] in _LIBRARIES
    return is_named or _INSTALLED in function.__code__.co_filename


def _is_own(module: types.ModuleType) -> bool:
    """Whether a module is the user's."""
    file = getattr(module, "__file__", None) or _INSTALLED
    return _INSTALLED not in file and not file.startswith(sysconfig.get_path("stdlib"))


def _names(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a function, those of functions within it too."""
    within = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *itertools.chain(*within)]))


def _code_digest(code: types.CodeType) -> int:
    """A checksum of what a function does; processes have the same version of Python."""
    consts = [
        _code_digest(one) if isinstance(one, types.CodeType) else repr(one)
        for one in code.co_consts
        if not isinstance(one, frozenset)  # its order is a process's own
    ]
    return zlib.crc32(repr((code.co_code, code.co_names, code.co_varnames, consts)).encode())


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function knows from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # no value yet
            found.append(cell.cell_contents)
    return found


def _holds_plain(value: Any, depth: int = 8) -> bool:
    """Whether a list, a dictionary or an array holds plain values only, `depth` deep at most."""
    if isinstance(value, (list, tuple)):
        parts = (one is None or _is_plain(one) or _holds_plain(one, depth - 1) for one in value)
        return depth > 0 and all(parts)
    if isinstance(value, (set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and _holds_plain(list(value.values()), depth - 1)
    return isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biuf"


def _is_described(value: Any) -> bool:
    return isinstance(value, _DESCRIBED) or _holds_plain(value)


def _is_array(value: Any) -> bool:
    """Whether a value is an array, or a tensor, no variable, of which this process has all."""
    is_there = hasattr(value, "numpy") or getattr(value, "is_fully_addressable", False)
    is_tensor = is_there and keras.ops.is_tensor(value) and not hasattr(value, "assign")
    return isinstance(value, (np.generic, np.ndarray)) or is_tensor


def _numpy(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _is_plain(value: Any) -> bool:
    """Whether `repr` gives the same text in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))
