"""Runs a case plain and parallel, and returns the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_multigpu

from . import catalogue, compare, draw, program, rounding
from .case import Case

EQUAL = "equal"
REFUSED = "refused"  # by an error of the library
WARNED = "warned"  # different numbers, and a warning of the library
NOISE = "rounding"  # different numbers: rounding alone changes plain Keras's as much
RANDOM = "random"  # different numbers: plain Keras draws them even in inference
PLAIN_FAILS = "plain fails"
DIFFERENT = "DIFFERENT"
CRASHED = "CRASHED"
HUNG = "HUNG"
OUTCOMES = (EQUAL, REFUSED, WARNED, NOISE, RANDOM, PLAIN_FAILS, DIFFERENT, CRASHED, HUNG)
BAD = (DIFFERENT, CRASHED, HUNG)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a case, in a word and in detail."""

    kind: str
    detail: str = ""
    warned: tuple[str, ...] = ()
    finite: bool = True
    floatx: str = "float64"


def run(case: Case, note: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Compares the two trainings of a case.

    Uses float32 if one of TensorFlow's operations has no float64 on a CPU.

    Args:
        case: the case.
        note: called when the parallel model begins, because that may end the process.
    """
    outcome = _run(case, note)
    if outcome.kind == PLAIN_FAILS and case.floatx == "float64" and _lacks_float64(outcome):
        outcome = _run(case.having(floatx="float32"), note)
        outcome = dataclasses.replace(outcome, floatx="float32")
    return outcome


def _lacks_float64(outcome: Outcome) -> bool:
    return "double" in outcome.detail or "DT_DOUBLE" in outcome.detail


def _run(case: Case, note: Callable[[str], None]) -> Outcome:
    """Runs a case as it is.

    On TensorFlow the plain model runs eagerly, which is faster. If the two differ, it runs again
    with the case's own settings, and then with weights and data changed in their last digits.
    """
    keras.config.set_floatx(case.floatx)
    keras.config.set_dtype_policy(case.floatx)
    names = draw.namespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program.definitions(case), case.name, "exec"), names)
        try:
            plain = _plain(names, eager=not catalogue.ON_JAX)
        except Exception as error:  # whatever Keras raises, there is nothing to compare with
            return Outcome(PLAIN_FAILS, _tell(error))
    note("parallel")
    with _warnings() as warned:
        try:
            parallel = _parallel(case, names)
        except Exception as error:  # sorted by whose error it is
            return failure(names, error)
    note("compared")
    finite = compare.is_finite(plain)
    found = compare.gaps(plain, parallel)
    if not found:
        return Outcome(EQUAL, "", tuple(warned), finite)
    return dataclasses.replace(
        _difference(case, names, parallel), warned=tuple(warned), finite=finite
    )


def _difference(case: Case, names: dict[str, Any], parallel: Any) -> Outcome:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            plain = _plain(names, eager=False)
        except Exception as error:  # plain Keras can't do it with these settings
            return Outcome(PLAIN_FAILS, _tell(error))
        found = compare.gaps(plain, parallel)
        if not found:
            return Outcome(EQUAL)
        if not catalogue.ON_JAX and _draws(names):
            return Outcome(RANDOM, "; ".join(map(str, found[:4])))
        disturbed = _disturbed(case, names)
    moved = compare.noise(plain, disturbed)
    detail = "; ".join(map(str, sorted(found, key=lambda gap: -gap.size / (gap.scale + 1e-30))[:4]))
    worst = max(moved.get(gap.place, 0.0) for gap in found)
    detail += f" (rounding: {worst:.2g})"
    return Outcome(NOISE if compare.explained(found, moved) else DIFFERENT, detail)


def _draws(names: dict[str, Any]) -> bool:
    """Whether a plain model gives different numbers with different seeds."""
    first, second = (_plain(names, eager=True, reseeded=flag) for flag in (False, True))
    return bool(compare.gaps(first, second))


def classify(outcome: Outcome) -> Outcome:
    """Reclassifies a difference that the library has warned of: it is not silent."""
    if outcome.kind == DIFFERENT and outcome.warned:
        return dataclasses.replace(outcome, kind=WARNED)
    return outcome


def _plain(
    names: dict[str, Any], *, eager: bool, disturbed: int = 0, reseeded: bool = False
) -> dict[str, Any]:
    _start()
    model = names["build"]()
    x = rounding.disturb(names["X"], disturbed) if disturbed else names["X"]
    if disturbed and model.built:
        model.set_weights(rounding.disturb(model.get_weights(), disturbed))
    for variable in model.variables if reseeded else ():
        if "seed_generator" in variable.path:
            variable.assign(variable + 17)
    if eager:
        original = model.compile
        model.compile = lambda **kwargs: original(
            **{**kwargs, "run_eagerly": True, "jit_compile": False}
        )
    with rounding.replaced(names, X=x):
        return _results(names, model)


def _disturbed(case: Case, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Plain Keras's results with disturbed last digits."""
    found = [_plain(names, eager=True, disturbed=seed) for seed in (1, 2, 3)]
    if rounding.turns(case, names):
        other = {name: rounding.turned(case, names[name]) for name in ("X", "Y", "W")}
        with rounding.replaced(names, **other):
            result = _plain(names, eager=True)
        if "predict" in result:
            result["predict"] = rounding.turned(case, result["predict"])
        found.append(result)
    return found


def _parallel(case: Case, names: dict[str, Any]) -> dict[str, Any]:
    _start()
    options = {name: eval(value) for name, value in case.options}
    model = keras_multigpu.make_parallel(names["build"](), case.n, mode=case.mode, **options)
    return _results(names, model)


def _start() -> None:
    """Gives each model the same names and the same initial weights."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)


def _results(names: dict[str, Any], model: keras.Model) -> dict[str, Any]:
    keras.utils.set_random_seed(4)
    out = names["use"](model)
    out["weights"] = [np.asarray(weight) for weight in model.weights]
    out["optimizer"] = [np.asarray(variable) for variable in model.optimizer.variables]
    out["metrics"] = [np.asarray(variable) for variable in model.metrics_variables]
    return out


def failure(names: dict[str, Any], error: Exception) -> Outcome:
    """Classifies an error of the parallel model: refused, plain Keras fails too, or a crash."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _plain(names, eager=False)
        except Exception as plain_error:  # Keras fails with these settings
            return Outcome(PLAIN_FAILS, _tell(plain_error))
    # The error's stack, or TensorFlow's stack in its text.
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files += re.findall(r'File "([^"]*)"', str(error))
    if isinstance(error, (ValueError, TypeError, RuntimeError)) and "/keras_multigpu/" in files[-1]:
        return Outcome(REFUSED, _tell(error))
    return Outcome(CRASHED, _tell(error))


def _tell(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The texts of the library's warnings in this scope, recognized by their module."""
    texts: list[str] = []
    warn = warnings.warn

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("keras_multigpu"):
            texts.append(" ".join(str(message).split())[:400])
        warn(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn = note
        try:
            yield texts
        finally:
            warnings.warn = warn
