"""Calls a traced template on made-up rows: on all of them together, and on two parts of them.

The weights are changed, so that none is zero, and constants are in place of random numbers. The
model is left unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.probing.batchwide import BatchWide, sum_of
from keras_multigpu.engines.tensorflow.probing.made_up import Settings, make_up, perturb, take_part
from keras_multigpu.engines.tensorflow.probing.places import row_size
from keras_multigpu.engines.tensorflow.probing.stilled import Stilled
from keras_multigpu.engines.tensorflow.results import tensors_of
from keras_multigpu.engines.tensorflow.tensors import message_of
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.tensorflow.weights.reading import stored
from keras_multigpu.engines.values import Tensor

_AXES = (32, 16, 64, 128)
_HIGHS = (8, 2, 1)
# More to try: on few rows and small numbers a rule may fit by chance, or because a threshold is
# not reached, or reached by all parts of a batch.
_MORE = ({"rows": 9, "scale": 30.0}, {"rows": 3, "scale": 1000.0}, {"rows": 4, "growth": 1000.0})
# If numbers of the whole batch may make a choice: it is another one in the second part.
_SIZES = [{"rows": 4, "scale": scale, "growth": 1000.0} for scale in (1e-6, 1e-3, 1e3, 1e6)]

# If a count may make a choice: it is often the same in both parts, but not in six pairs of rows.
_COUNTS = [{"rows": 2, "scale": scale} for scale in (1.0, 1.0, 1.0, 1.0, 30.0, 30.0)]
# If the places of rows may have an effect: as many rows as cost little, in numbers computed.
_BUDGET, _FEWEST, _MOST, _FEW = 4_000_000, 16, 480, 7
# Rows that a model takes if it takes no three: in groups, say.
_GROUPED = 60


class ProbeError(Exception):
    """The template could not be called on made-up rows."""


class DependenceError(Exception):
    """Rows depend on each other: a part of a batch fails without the others."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A template's results on made-up rows and on two parts of them.

    Attributes:
        settings: those of the made-up rows.
        counts: the row counts of the two parts.
        state: the values of the template's variables.
        calls: the arguments of the three calls: all rows, and the two parts.
        results: the traced function's outputs in each call.
    """

    settings: Settings
    counts: tuple[int, int]
    state: list[Tensor]
    calls: list[Any]
    results: list[list[np.ndarray]]


class Tries:
    """The calls of a traced template on made-up rows.

    Attributes:
        stilled: the traced function, without random numbers.
        few: the tries on a few rows, once they have run.
        many: those on many rows. What only one of these shows is rounding: of many numbers some
            are so close to a step that rounding decides.
    """

    def __init__(self, trace: Trace, rng: np.random.Generator):
        self._trace = trace
        self._rng = rng
        self.stilled = Stilled(trace.forward)
        self.few: list[Tried] = []
        self.many: list[Tried] = []

    @property
    def device(self) -> str:
        """Where such rows can be computed."""
        return self.few[0].settings.device

    @property
    def every(self) -> list[Tried]:
        return [*self.few, *self.many]

    def run(self, wide: BatchWide, sees_places: bool) -> None:
        """Tries the template on some rows.

        More often if results have numbers of the whole batch, by `wide`; on many rows if their
        places or number may have an effect.

        Raises:
            ProbeError: if the template can't be called on made-up rows.
            DependenceError: if it can be called on them, and not on a part of them.
        """
        self.few = [self._try(self._candidates())]
        first = self.few[0].settings
        self.few += self._try_all([dataclasses.replace(first, **more) for more in self._more(wide)])
        if sees_places:
            rows = _BUDGET // row_size(self._trace.forward.graph, first.axis)
            rows = min(max(rows, _FEWEST, first.rows), _MOST) // first.rows * first.rows
            self.many = self._try_all([dataclasses.replace(first, rows=rows)] * 2)

    def _try_all(self, choices: Iterable[Settings]) -> list[Tried]:
        found = []
        for settings in choices:
            try:
                found.append(self._try([settings]))
            except ProbeError:
                continue  # such numbers overflow, or the row count is fixed
        return found

    def _more(self, wide: BatchWide) -> list[dict[str, Any]]:
        """Settings to try after the first: more of them if the results have numbers of all rows."""
        made = self._trace.forward.structured_outputs
        of_rows, of_batch = (
            sum_of([wide.traits(one) for one in tensors_of(results)])
            for results in (
                (made["outputs"], made["attributes"]),
                (made["losses"], made["updates"]),
            )
        )
        if wide.loops_by_rows:  # which may run for as long as numbers are large
            return [_MORE[0], *_COUNTS]
        sizes = _SIZES if of_rows.maker or of_batch.is_curved else []
        return [*_MORE, *sizes, *(_COUNTS if of_rows.has_count else [])]

    def _try(self, choices: Iterable[Settings]) -> Tried:
        """Calls the template on the first made-up rows that it accepts."""
        problem: Exception | None = None
        for settings in choices:
            counts = _parts(settings.rows)
            try:
                with tf.init_scope(), tf.device(settings.device):
                    calls = self._calls(settings)
                    state = [perturb(stored(v), self._rng) for v in self._trace.variables]
                    whole = self.stilled(state, calls[0])
            except Exception as error:  # the template may raise anything on unsuitable rows
                problem = problem or error
                continue
            try:
                with tf.init_scope(), tf.device(settings.device):
                    results = [whole, *(self.stilled(state, call) for call in calls[1:])]
            except Exception as error:
                text = f"a part of a batch fails alone ({_first_line(error)})"
                raise DependenceError(text) from error
            if all(np.all(np.isfinite(one)) for one in whole if one.dtype.kind == "f"):
                return Tried(settings, counts, state, calls, results)
            problem = problem or ProbeError("it gave numbers that are not finite")
        raise ProbeError(_first_line(problem))

    def _candidates(self) -> Iterator[Settings]:
        """Settings to try, the likeliest first."""
        tensors, _ = self._trace.arguments
        shapes = [one.shape.as_list()[1:] for one in tensors if one.shape.rank]
        inner = {axis for shape in shapes for axis in shape if axis and 1 < axis <= 64}
        axes = _AXES if any(None in shape for shape in shapes) else _AXES[:1]
        highs = _HIGHS if any(one.dtype.is_integer for one in tensors) else _HIGHS[:1]
        # Operations traced on a host with GPUs (cuDNN's recurrent layers) may run only there.
        devices = ("cpu:0", "gpu:0") if tf.config.list_physical_devices("GPU") else ("cpu:0",)
        own = {one.shape[0] for one in tensors if one.shape.rank and one.shape[0] is not None}
        known = [rows for rows in sorted(own) if 3 < rows <= _MOST]
        counts = dict.fromkeys((3, *sorted(inner)[:4], *known[:1], _GROUPED))
        choices = itertools.product(devices, counts, axes, highs, (False, True))
        for device, rows, axis, high, positive in choices:
            yield Settings(rows, axis, high, positive=positive, device=device)

    def _calls(self, settings: Settings) -> list[Any]:
        tensors, attributes = self._trace.arguments
        whole = [make_up(one, settings, self._rng) for one in tensors]
        hung = [
            {name: make_up(one, settings, self._rng) for name, one in own.items()}
            for own in attributes
        ]
        rows = settings.rows

        def part(start: int, size: int) -> Any:
            return tf.nest.map_structure(
                lambda one: take_part(one, start, size, rows), (whole, hung)
            )

        first, second = _parts(rows)
        return [(whole, hung), part(0, first), part(first, second)]


def _parts(rows: int) -> tuple[int, int]:
    """The row counts of two parts: 2 and 1 for three rows.

    Of many, the second has a few only: too few for what begins with a number of rows.
    """
    second = min(rows // 2, _FEW)
    return rows - second, second


def _first_line(error: Exception | None) -> str:
    text = message_of(error).strip().splitlines() if error else []
    return f"{type(error).__name__}: {text[0][:200]}" if text else repr(error)
