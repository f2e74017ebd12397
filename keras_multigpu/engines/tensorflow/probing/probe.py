"""Judges a template by tries on made-up rows.

A batch can be sliced if every row's outputs are the same in a batch and in a part of it. Added
losses, assigned states and gradients of table rows are merged by the rule that fits on these rows
(`engines/kinds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.kinds import MAXIMUM, MINIMUM, ROWS, SAME, find_kinds
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.probing.batchwide import BatchWide
from keras_multigpu.engines.tensorflow.probing.tries import Tried, Tries
from keras_multigpu.engines.tensorflow.tensors import floats, for_any_rows
from keras_multigpu.engines.tensorflow.tracing.inspection import counts_rows, layer_of
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.tensorflow.weights.reading import stored
from keras_multigpu.engines.values import Tensor


class Probe:
    """What tries of a traced template on made-up rows show."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._rng = np.random.default_rng(0)
        self._tries = Tries(trace, self._rng)
        self.wide = BatchWide.of_call(trace.forward.graph, trace.batch)
        operations = trace.forward.graph.get_operations()
        halves = (tf.float16, tf.bfloat16)
        self.is_half = any(one.dtype in halves for op in operations for one in op.outputs)

    def find_dependence(self, sees_places: bool) -> str | None:
        """Why the rows of the outputs depend on each other, or `None`.

        Args:
            sees_places: whether the places of rows may have an effect.

        Raises:
            ProbeError: if the template can't be called on made-up rows.
            DependenceError: if it can be called on them, and not on a part of them.
        """
        self._tries.run(self.wide, sees_places)
        made = self._trace.forward.structured_outputs
        places = _places(self._trace.forward, (made["outputs"], made["attributes"]))
        for place in places:
            without = next(self._tries_without_rows(place), None)
            if without is not None:
                return self._first_dependence(without) or self._without_rows(place)
        return next((told for place in places if (told := self._reached(place))), None)

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
            {
                divmod(tried.results[0][place].shape[0], sum(tried.counts))
                for tried in self._tries.every
            }
            for place in places
        ]
        return [min(each)[0] if len(each) == 1 and not min(each)[1] else None for each in every]

    def find_rules(self) -> tuple[list[set[str]], dict[str, set[str]]]:
        """The rules that fit each loss, and those that fit each assigned state."""
        forward = self._trace.forward
        losses = forward.structured_outputs["losses"]
        updates = forward.structured_outputs["updates"]
        places = _places(forward, [*losses, *updates.values()])
        with tf.init_scope():
            others = {key: stored(self._trace.assigned[key]) for key in updates}

        def fitting(tried: Tried) -> list[set[str]]:
            known = dict(zip(map(id, self._trace.variables), tried.state))
            before = [None] * len(losses) + [known.get(int(key), others[key]) for key in updates]
            return [self._kinds(place, tried, start) for place, start in zip(places, before)]

        kinds = [set.intersection(*found) for found in zip(*map(fitting, self._tries.few))]
        many = [set.union(*found) for found in zip(*map(fitting, self._summable()))]
        kinds = [one & two for one, two in zip(kinds, many or kinds)]
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
        tries = self._tries.few + self._summable()
        found: list[list[Any]] = [[] for _ in tries]

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
            for tried, gradients in zip(tries, found):
                for call, upstream in zip(tried.calls, self._upstream(tried, results, scale)):
                    with tf.device(self._tries.device):
                        gradients.append(function(list(tried.state), call, upstream))

        in_fresh_thread(run)  # in `init_scope` no tape would record
        for number in range(len(found[0][0])):
            yield [
                (gradients[0][number], [one[number] for one in gradients[1:]], tried.counts)
                for tried, gradients in zip(tries, found)
            ]

    def _summable(self) -> list[Tried]:
        """The tries on many rows, unless their sums are mostly rounding."""
        return [] if self.is_half else self._tries.many

    def _upstream(
        self, tried: Tried, results: Sequence[Tensor], scale: float
    ) -> Iterator[list[Tensor]]:
        """Made-up gradients of the results of all rows and of the two parts, equal row by row."""
        at = _places(self._trace.forward, results)
        whole = [scale * self._rng.normal(size=tried.results[0][place].shape) for place in at]
        for number, made in enumerate(tried.results):
            before = [tried.results[1][place].shape[0] if number == 2 else 0 for place in at]
            yield [
                tf.cast(values[start : start + made[place].shape[0]], result.dtype)
                for place, start, result, values in zip(at, before, results, whole)
            ]

    def _kinds(self, place: int, tried: Tried, before: Any = None) -> set[str]:
        whole, *parts = (values[place] for values in tried.results)
        return find_kinds(whole, parts, tried.counts, before, self.is_half)

    def _tries_without_rows(self, place: int) -> Iterator[Tried]:
        """The tries that show that a result's rows depend on each other."""
        yield from (one for one in self._tries.few if ROWS not in self._kinds(place, one))
        if all(ROWS not in self._kinds(place, one) for one in self._tries.many):
            yield from self._tries.many

    def _without_rows(self, place: int) -> str:
        operation = self._trace.forward.outputs[place].op
        while operation.type == "Identity":
            operation = operation.inputs[0].op
        return f"in {layer_of(operation.name)} the rows of a batch depend on each other"

    def _first_dependence(self, tried: Tried) -> str | None:
        """The layer in which rows first depend on each other."""
        for name, *values in self._tries.stilled.trace_rows(tried.state, tried.calls):
            whole, *parts = values
            if ROWS not in find_kinds(whole, parts, tried.counts, None, self.is_half):
                return f"in {layer_of(name)} the rows of a batch depend on each other"
        return None


def _places(forward: Any, structure: Any) -> list[int]:
    """The indices of tensors among a traced function's flat outputs."""
    numbers = {id(one): number for number, one in enumerate(forward.outputs)}
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [numbers[id(one)] for one in flat]
