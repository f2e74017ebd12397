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

from . import catalogue, compare, draw, fusions, program, trainings
from .case import Case
from .trainings import Training

EQUAL = "equal"
REFUSED = "refused"  # by an error of the library
WARNED = "warned"  # different numbers, and a warning of the library
NOISE = "rounding"  # different numbers: rounding alone changes plain Keras's as much
RANDOM = "random"  # different numbers: plain Keras draws them even in inference
FUSED = "fused"  # different numbers, and equal ones if XLA fuses no operations
PLAIN_FAILS = "plain fails"
DIFFERENT = "DIFFERENT"
CRASHED = "CRASHED"
HUNG = "HUNG"
OUTCOMES = (EQUAL, REFUSED, WARNED, NOISE, RANDOM, FUSED, PLAIN_FAILS, DIFFERENT, CRASHED, HUNG)
BAD = (DIFFERENT, CRASHED, HUNG)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a case, in a word and in detail.

    Attributes:
        trials: how many of the case's trials were equal.
        shown: the case that shows it: of a trial, the one that trains a new model.
    """

    kind: str
    detail: str = ""
    warned: tuple[str, ...] = ()
    finite: bool = True
    floatx: str = "float64"
    trials: int = 0
    shown: Case | None = None


class Plain:
    """A case's plain model: trained once for all modes that it is compared with.

    On TensorFlow it runs eagerly, which is faster for a few steps. With several outputs, Keras's
    own logs are others if it runs eagerly.

    Raises:
        Exception: whatever Keras raises.
    """

    def __init__(self, case: Case):
        keras.config.set_floatx(case.floatx)
        keras.config.set_dtype_policy(case.floatx)
        self.names = draw.namespace()
        self._trials: list[dict[str, Any]] = []
        self.is_eager = not catalogue.ON_JAX and len(case.heads) == 1
        with _quiet():
            exec(compile(program.definitions(case), case.name, "exec"), self.names)
            self.training = trainings.plain(self.names, eager=self.is_eager)
        self.result, self.begin = self.training.result, self.training.begin
        self.is_finite = compare.is_finite(self.result)

    def trial(self, number: int) -> dict[str, Any]:
        """The results of a trial; the trials run in their order."""
        while len(self._trials) <= number:
            self._trials.append(self.training.trial(len(self._trials), self.begin))
        return self._trials[number]


def run(case: Case, note: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Compares the two trainings of a case."""
    return next(run_all([case], note))


def run_all(
    cases: list[Case], note: Callable[[str], None] = lambda stage: None
) -> Iterator[Outcome]:
    """Compares the trainings of cases that differ in the parallel side only.

    Uses float32 if one of TensorFlow's operations has no float64 on a CPU.

    Args:
        cases: the cases; their plain models are one.
        note: called when a parallel model begins, because that may end the process.
    """
    first = cases[0]
    try:
        plain = Plain(first)
    except Exception as error:  # whatever Keras raises, there is nothing to compare with
        if first.floatx == "float64" and _lacks_float64(error):
            cases = [case.having(floatx="float32") for case in cases]
            for outcome in run_all(cases, note):
                yield dataclasses.replace(outcome, floatx="float32")
            return
        for case in cases:
            yield Outcome(PLAIN_FAILS, _tell(error), floatx=case.floatx)
        return
    for case in cases:
        note("parallel")
        with _warnings() as warned:
            outcome = _compare(case, plain)
        note("compared")
        yield dataclasses.replace(
            outcome, warned=(*outcome.warned, *warned), finite=plain.is_finite, floatx=case.floatx
        )


def _lacks_float64(error: Exception) -> bool:
    return "double" in _tell(error) or "DT_DOUBLE" in _tell(error)


def _compare(case: Case, plain: Plain) -> Outcome:
    """Compares with one parallel model: its first training, then the trials."""
    try:
        parallel = trainings.parallel(case, plain.names)
    except Exception as error:  # sorted by whose error it is
        return failure(plain.names, error)
    if compare.gaps(plain.result, parallel.result):
        return _difference(case, plain.names, parallel.result)
    done = 0
    for number in range(len(case.trials) if plain.is_finite else 0):
        try:
            with _quiet():
                expected = plain.trial(number)
        except Exception as error:  # Keras can't take these data
            return Outcome(EQUAL, f"trial {number}: plain fails: {_tell(error)}", trials=done)
        try:
            result = parallel.trial(number, plain.begin)
        except Exception as error:  # plain Keras did it
            return Outcome(CRASHED, f"trial {number}: {_tell(error)}", trials=done)
        if compare.gaps(expected, result):
            found = _difference_in_trial(case, plain, number, result)
            if found.kind != EQUAL:
                return dataclasses.replace(found, trials=done)
        done += 1
    return Outcome(EQUAL, trials=done)


def _difference_in_trial(case: Case, plain: Plain, number: int, result: Any) -> Outcome:
    """What a difference in a trial is: a new model with the trial's data shows it, too, or not."""
    fresh = case.fresh(number)
    outcome = run(fresh)
    if outcome.kind in (*BAD, RANDOM, FUSED):
        return dataclasses.replace(outcome, shown=fresh)

    def take(training: Training) -> dict[str, Any]:
        return [training.trial(one, plain.begin) for one in range(number + 1)][-1]

    with _quiet():
        first, *others = (
            take(trainings.plain(plain.names, eager=False, **how))
            for how in ({}, *trainings.disturbances(case))
        )
        judged = _judge(first, others, result)
        if judged.kind == DIFFERENT and _draws(case, plain.names, take):
            judged = dataclasses.replace(judged, kind=RANDOM)
        judged = _unless_fused(judged, case, plain.names, take)
    shown = case.having(trials=case.trials[: number + 1])
    return dataclasses.replace(judged, detail=f"trial {number}: {judged.detail}", shown=shown)


def _difference(case: Case, names: dict[str, Any], parallel: Any) -> Outcome:
    """What a difference is: the plain model runs again, with the case's own settings.

    Then it runs with weights and data changed in their last digits.
    """

    def take(training: Training) -> dict[str, Any]:
        return training.result

    with _quiet():
        try:
            plain = trainings.plain(names, eager=False).result
        except Exception as error:  # plain Keras can't do it with these settings
            return Outcome(PLAIN_FAILS, _tell(error))
        found = compare.gaps(plain, parallel)
        if not found:
            return Outcome(EQUAL)
        if _draws(case, names, take):
            return Outcome(RANDOM, "; ".join(map(str, found[:4])))
        judged = _judge(plain, trainings.disturbed(case, names), parallel)
        return _unless_fused(judged, case, names, take)


def _judge(plain: Any, disturbed: list[Any], parallel: Any) -> Outcome:
    """Whether rounding alone changes the plain results as much."""
    found = compare.gaps(plain, parallel)
    if not found:
        return Outcome(EQUAL)
    moved = compare.noise(plain, disturbed)
    detail = "; ".join(map(str, sorted(found, key=lambda gap: -gap.size / (gap.scale + 1e-30))[:4]))
    worst = max(moved.get(gap.place, 0.0) for gap in found)
    detail += f" (rounding: {worst:.2g})"
    return Outcome(NOISE if compare.explained(found, moved) else DIFFERENT, detail)


def _draws(case: Case, names: dict[str, Any], take: Callable[[Training], Any]) -> bool:
    """Whether replicas draw different numbers: on TensorFlow, and of a tower anywhere.

    Plain models then give other results with other seeds. One other seed may not show it: a bin or
    a maximum often stays the same.
    """
    if catalogue.ON_JAX and case.mode != "tower":
        return False

    def results(seed: int) -> Any:
        return take(trainings.plain(names, eager=not catalogue.ON_JAX, reseeded=seed))

    first = results(0)
    return any(compare.gaps(first, results(seed)) for seed in (17, 1, 2, 3))


def _unless_fused(
    judged: Outcome, case: Case, names: dict[str, Any], take: Callable[[Training], Any]
) -> Outcome:
    """Reclassifies a difference on JAX that is gone if XLA fuses no operations."""
    if judged.kind != DIFFERENT or not catalogue.ON_JAX:
        return judged
    with fusions.none_on_jax():
        plain = take(trainings.plain(names, eager=False))
        differs = compare.gaps(plain, take(trainings.parallel(case, names)))
    return judged if differs else dataclasses.replace(judged, kind=FUSED)


def classify(outcome: Outcome) -> Outcome:
    """Reclassifies a difference that the library has warned of: it is not silent."""
    if outcome.kind == DIFFERENT and outcome.warned:
        return dataclasses.replace(outcome, kind=WARNED)
    return outcome


def failure(names: dict[str, Any], error: Exception) -> Outcome:
    """Classifies an error of the parallel model: refused, plain Keras fails too, or a crash."""
    with _quiet():
        try:
            trainings.plain(names, eager=False)
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
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        yield


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The texts of the library's warnings in this scope, recognized by their module."""
    texts: list[str] = []
    warn = warnings.warn

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("keras_multigpu"):
            text = " ".join(str(message).split())[:400]
            # A model may be trained again, to judge a difference, and be too small for `shard`.
            if text not in texts and "spreads nothing" not in text:
                texts.append(text)
        warn(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn = note
        try:
            yield texts
        finally:
            warnings.warn = warn
