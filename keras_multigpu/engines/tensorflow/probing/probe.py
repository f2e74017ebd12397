"""Tries a template on made-up rows: on all of them together, and on two parts of them.

A batch can be sliced if every row's outputs are the same in both. Added losses, assigned states and
gradients of table rows are merged by the rule that fits on these rows (`engines/kinds.py`). The
probe uses changed weights, so that none is zero, and constants in place of random numbers. It
leaves the model unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.kinds import MAXIMUM, MINIMUM, ROWS, SAME, find_kinds
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.probing.batchwide import BatchWide, sum_of
from keras_multigpu.engines.tensorflow.probing.made_up import Settings, make_up, perturb, take_part
from keras_multigpu.engines.tensorflow.probing.stilled import Stilled
from keras_multigpu.engines.tensorflow.results import tensors_of
from keras_multigpu.engines.tensorflow.tensors import floats, for_any_rows, message_of
from keras_multigpu.engines.tensorflow.tracing.inspection import counts_rows, layer_of
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


class ProbeError(Exception):
    """The template could not be called on made-up rows."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A template's results on made-up rows and on two parts of them.

    Attributes:
        counts: the row counts of the two parts.
        state: the values of the template's variables.
        calls: the arguments of the three calls: all rows, and the two parts.
        results: the traced function's outputs in each call.
    """

    counts: tuple[int, int]
    state: list[Tensor]
    calls: list[Any]
    results: list[list[np.ndarray]]


class Probe:
    """Calls a traced template on made-up rows."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._stilled = Stilled(trace.forward)
        self._rng = np.random.default_rng(0)
        self._settings = Settings()
        self._every: list[Tried] = []
        self.wide = BatchWide.of_call(trace.forward.graph, trace.batch)
        operations = trace.forward.graph.get_operations()
        halves = (tf.float16, tf.bfloat16)
        self.is_half = any(one.dtype in halves for op in operations for one in op.outputs)

    def find_dependence(self) -> str | None:
        """Why the rows of the outputs depend on each other, or `None`.

        Raises:
            ProbeError: if the template can't be called on made-up rows.
        """
        self._every = [self._try(self._candidates())]
        first = self._settings
        for more in self._more():
            try:
                self._every.append(self._try([dataclasses.replace(first, **more)]))
            except ProbeError:
                continue  # such numbers overflow, or the row count is fixed
        made = self._trace.forward.structured_outputs
        places = _places(self._trace.forward, (made["outputs"], made["attributes"]))
        for tried, place in itertools.product(self._every, places):
            if ROWS not in self._kinds(place, tried):
                return self._first_dependence(tried) or self._without_rows(place)
        return next((told for place in places if (told := self._reached(place))), None)

    def _more(self) -> list[dict[str, Any]]:
        """Settings to try after the first: more of them if the results have numbers of all rows."""
        made = self._trace.forward.structured_outputs
        of_rows, of_batch = (
            sum_of([self.wide.traits(one) for one in tensors_of(results)])
            for results in (
                (made["outputs"], made["attributes"]),
                (made["losses"], made["updates"]),
            )
        )
        if self.wide.loops_by_rows:  # which may run for as long as numbers are large
            return [_MORE[0], *_COUNTS]
        sizes = _SIZES if of_rows.maker or of_batch.is_curved else []
        return [*_MORE, *sizes, *(_COUNTS if of_rows.has_count else [])]

    def _reached(self, place: int) -> str | None:
        """Why a result may depend on other rows, beyond what the made-up rows have shown."""
        maker = self.wide.traits(self._trace.forward.outputs[place]).maker
        if maker is None:
            return None
        return (
            f"in {layer_of(maker.name)} the rows of a batch may depend on each other, by its "
            f"{maker.type}"
        )

    def rows_for_each(self) -> list[int | None]:
        """How many rows each output has for a row of the batch; `None` if their number varies."""
        forward = self._trace.forward
        places = _places(forward, forward.structured_outputs["outputs"])
        if counts_rows(forward.graph):
            return [None] * len(places)
        every = [
            {divmod(tried.results[0][place].shape[0], sum(tried.counts)) for tried in self._every}
            for place in places
        ]
        return [min(each)[0] if len(each) == 1 and not min(each)[1] else None for each in every]

    def find_rules(self) -> tuple[list[set[str]], dict[str, set[str]]]:
        """The rules that fit each loss, and those that fit each assigned state."""
        forward = self._trace.forward
        losses = forward.structured_outputs["losses"]
        updates = forward.structured_outputs["updates"]
        places = _places(forward, [*losses, *updates.values()])
        kinds: list[set[str]] = []
        for tried in self._every:
            known = dict(zip(map(id, self._trace.variables), tried.state))
            with tf.init_scope():
                others = {key: stored(self._trace.assigned[key]) for key in updates}
            before = [None] * len(losses) + [known.get(int(key), others[key]) for key in updates]
            found = [self._kinds(place, tried, start) for place, start in zip(places, before)]
            kinds = [one & two for one, two in zip(found, kinds or found)]
        for number, place in enumerate(places):
            traits = self.wide.traits(forward.outputs[place])
            if traits.is_curved or traits.is_stepped:
                # If it is the same in all parts of all batches, no rule has been tried.
                is_tried = SAME not in kinds[number]
                may_be = traits.is_extreme and not traits.is_stepped and is_tried
                kinds[number] &= {MAXIMUM, MINIMUM} if may_be else set()
        return kinds[: len(losses)], dict(zip(updates, kinds[len(losses) :]))

    def gradients(
        self, places: Sequence[int], scale: float = 1.0, with_batch: bool = False
    ) -> Iterator[list[tuple[Any, list[Any], tuple[int, int]]]]:
        """Each variable's gradients in every try: on all rows, on the two parts; the row counts.

        Made-up gradients of the results are about as large as `scale`. With `with_batch` come the
        gradients by the call's arguments, too.
        """
        forward = self._trace.forward
        structured = forward.structured_outputs
        results = floats((structured["outputs"], structured["attributes"]))
        found: list[list[Any]] = [[] for _ in self._every]

        def differentiate(state: list[Tensor], call: Any, upstream: list[Tensor]) -> list[Any]:
            sources = [state[place] for place in places] + (floats(call) if with_batch else [])
            with tf.GradientTape() as tape:
                tape.watch(sources)
                made = forward(state, call, tf.constant(0), tf.constant(1.0))
            outputs = floats((made["outputs"], made["attributes"]))
            return tape.gradient(outputs, sources, output_gradients=upstream)

        def run() -> None:
            function = tf.function(differentiate, autograph=False).get_concrete_function(
                [tf.TensorSpec(v.shape, v._value.dtype) for v in self._trace.variables],
                tf.nest.map_structure(for_any_rows, self._trace.arguments),
                [for_any_rows(result) for result in results],
            )
            for tried, gradients in zip(self._every, found):
                for call, upstream in zip(tried.calls, self._upstream(tried, results, scale)):
                    with tf.device(self._settings.device):
                        gradients.append(function(list(tried.state), call, upstream))

        in_fresh_thread(run)  # in `init_scope` no tape would record
        for number in range(len(found[0][0])):
            yield [
                (gradients[0][number], [one[number] for one in gradients[1:]], tried.counts)
                for tried, gradients in zip(self._every, found)
            ]

    def _upstream(
        self, tried: Tried, results: Sequence[Tensor], scale: float
    ) -> Iterator[list[Tensor]]:
        """Made-up gradients of the results of all rows and of the two parts, equal row by row."""
        at = _places(self._trace.forward, results)
        whole = [scale * self._rng.normal(size=tried.results[0][place].shape) for place in at]
        for number, made in enumerate(tried.results):
            start = tried.counts[0] if number == 2 else 0
            yield [
                tf.cast(values[start : start + made[place].shape[0]], result.dtype)
                for place, result, values in zip(at, results, whole)
            ]

    def _kinds(self, place: int, tried: Tried, before: Any = None) -> set[str]:
        whole, *parts = (values[place] for values in tried.results)
        return find_kinds(whole, parts, tried.counts, before, self.is_half)

    def _try(self, choices: Iterable[Settings]) -> Tried:
        """Calls the template on the first made-up rows that it accepts."""
        problem: Exception | None = None
        for settings in choices:
            counts = _parts(settings.rows)
            try:
                with tf.init_scope(), tf.device(settings.device):
                    calls = self._calls(settings)
                    state = [perturb(stored(v), self._rng) for v in self._trace.variables]
                    whole = self._stilled(state, calls[0])
            except Exception as error:  # the template may raise anything on unsuitable rows
                problem = problem or error
                continue
            try:
                with tf.init_scope(), tf.device(settings.device):
                    results = [whole, *(self._stilled(state, call) for call in calls[1:])]
            except Exception as error:
                text = f"a part of a batch fails alone ({_first_line(error)})"
                raise DependenceError(text) from error
            if all(np.all(np.isfinite(one)) for one in whole if one.dtype.kind == "f"):
                self._settings = settings
                return Tried(counts, state, calls, results)
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
        choices = itertools.product(devices, (3, *sorted(inner)[:4]), axes, highs, (False, True))
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

    def _without_rows(self, place: int) -> str:
        operation = self._trace.forward.outputs[place].op
        while operation.type == "Identity":
            operation = operation.inputs[0].op
        return f"in {layer_of(operation.name)} the rows of a batch depend on each other"

    def _first_dependence(self, tried: Tried) -> str | None:
        """The layer in which rows first depend on each other."""
        for name, *values in self._stilled.trace_rows(tried.state, tried.calls):
            whole, *parts = values
            if ROWS not in find_kinds(whole, parts, tried.counts, None, self.is_half):
                return f"in {layer_of(name)} the rows of a batch depend on each other"
        return None


class DependenceError(Exception):
    """Rows depend on each other: a part of a batch fails without the others."""


def _parts(rows: int) -> tuple[int, int]:
    """The row counts of two parts: 2 and 1 for three rows."""
    return rows - rows // 2, rows // 2


def _places(forward: Any, structure: Any) -> list[int]:
    """The indices of tensors among a traced function's flat outputs."""
    numbers = {id(one): number for number, one in enumerate(forward.outputs)}
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [numbers[id(one)] for one in flat]


def _first_line(error: Exception | None) -> str:
    text = message_of(error).strip().splitlines() if error else []
    return f"{type(error).__name__}: {text[0][:200]}" if text else repr(error)
