"""What a process tells the others of its model: layers, weights, optimizer, loss and metrics.

What their code computes is compared when a step is traced (`listing.py`).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from keras_multigpu.engines.cluster.listing import Listing, digest_of

# What a process may have called by itself (the template's `predict`, say), and automatic names.
_OWN_AFFAIRS = frozenset(
    """
    name output_names built compiled is_awq_calibrated is_gptq_calibrated fit train_on_batch
    stop_training stop_evaluating stop_predicting train_function test_function predict_function
    """.split()
)
# Settings that are objects. (Initializers may have seeds of a process's own.)
_DESCRIBED = (
    keras.Loss,
    keras.Metric,
    keras.Optimizer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    LearningRateSchedule,
    functools.partial,
    types.FunctionType,
    types.MethodType,
)
_PLAIN = (bool, int, float, str)  # `repr` gives the same text in every process
_DEEPEST = 8  # objects within objects, which may refer to themselves


def facts_of_model(model: keras.Model) -> Listing:
    """A model's layers, its optimizer, and its weights: shapes, which are trained."""
    optimizer, found = getattr(model, "optimizer", None), Listing()
    for layer in model._flatten_layers():
        _add(found, f"layer {layer.name!r}", layer)
    for one in [*model.variables, *(optimizer.variables if optimizer is not None else ())]:
        known = tuple(one.shape), str(one.dtype), "trained" if one.trainable else "not trained"
        what = " ".join(map(str, known))
        found.add(what, f"variable {one.path!r}: {what}")
    _add(found, "the optimizer", optimizer)
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, LearningRateSchedule):  # a rate alone is compared with the weights
        _add(found, "the schedule", rate)
    return found


def facts_of_compilation(model: keras.Model) -> Listing:
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
    found = Listing()
    for key, value in forms.items():
        found.add((key, value), f"{key}={value!r}")
    return found


def _add(found: Listing, where: str, part: Any) -> None:
    """Adds the class of a layer or an optimizer, and its settings, but not its automatic name."""
    if part is not None:
        settings = [f"{key}={value}" for key, value in _settings(part, _DEEPEST)]
        for what in (type(part).__qualname__, *settings):
            found.add(what, f"{where}: {what}")


def _settings(part: Any, depth: int) -> list[tuple[str, str]]:
    """The settings of a layer, an optimizer or a loss of Keras's own.

    Objects of a user's class may keep what a process has of its own: its number, counts, times.
    """
    kept = []
    if isinstance(part, keras.Layer):
        kept.append(("dtype_policy", part.dtype_policy.name))
    if type(part).__module__.partition(".")[0] != "keras":
        return kept
    for name, value in sorted(vars(part).items()):
        if name.startswith("_") or name in _OWN_AFFAIRS:
            continue
        if _is_plain(value) or isinstance(value, _DESCRIBED):
            kept.append((name, repr(_form(value, depth))))
        elif callable(value) and hasattr(value, "__name__"):
            kept.append((name, value.__name__))
    return kept


def _form(value: Any, depth: int = _DEEPEST) -> Any:
    """A setting, a loss or a metric, or several: values, classes, settings, names of functions."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if not depth:
        return type(value).__qualname__
    form = functools.partial(_form, depth=depth - 1)
    if isinstance(value, (list, tuple)):
        return [form(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(form(value[key]))) for key in value)
    if isinstance(value, functools.partial):
        return form(value.func), form(value.args), form(value.keywords)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return value.__name__
    if isinstance(value, (np.generic, np.ndarray)):
        return digest_of([value], sys.maxsize)
    if not isinstance(value, _DESCRIBED):
        return type(value).__qualname__
    # Of a function that Keras wraps.
    wrapped = [form(vars(value)[one]) for one in ("_fn", "_fn_kwargs") if one in vars(value)]
    return type(value).__qualname__, dict(_settings(value, depth - 1)), *wrapped


def _is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value, and all that it holds, has the same form in every process."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.dtype.kind in "biuf"
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth > 0 and all(one is None or _is_plain(one, depth - 1) for one in value)
    return isinstance(value, _PLAIN)
