"""Loops over the rows (`map`): each device goes through its own rows.

Such a loop counts the rows from 0, takes from lists and puts into them what belongs to the row, and
adds to sums. Then an iteration needs no other: a device has lists of its rows' elements (`Listed`),
and an addend of each sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import EACH_DEVICE, NeedsOthers
from keras_multigpu.engines.tensorflow.partition.inner import Inner
from keras_multigpu.engines.tensorflow.partition.layouts import LISTED, SUM, WHOLE, Layout, Value
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.control import carried, origin, while_loop
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, elements_of
from keras_multigpu.engines.tensorflow.partition.states import State, joined_elements, state_of

COUNTER, LIST, ADDEND, SAME = "counter", "list", "sum", "same"
_ADDS = ("Add", "AddV2", "AddN")
_OF_TEST = frozenset({"Const", "Placeholder", "Less", "LogicalAnd", "Identity", "NoOp"})


def over_rows(
    planner: Planner, op: tf.Operation, values: list[Value], body: Any, test: Any
) -> list[Value] | None:
    """A loop over the rows, as each device runs it; `None` for others."""
    try:
        return _RowLoop(planner, op, values, body, test).plan()
    except NeedsOthers:
        return None


class _Iteration(Inner):
    """Plans what a device does for a row: nothing of it is split."""

    def __init__(self, outer: Planner):
        super().__init__(outer, EACH_DEVICE)
        self.splits = False

    def take(self, value: Value) -> Value:
        found = super().take(value)
        if found.axis is not None and found.const is None:
            found.layout = WHOLE  # gathered before the loop
        return found


class _RowLoop:
    """A loop, if it is one over the rows; its variables are of the `kinds`."""

    def __init__(
        self, planner: Planner, op: tf.Operation, values: list[Value], body: Any, test: Any
    ):
        self.planner, self.op, self.values, self.body = planner, op, values, body
        self.kinds = [_kind(*one) for one in zip(values, body.inputs, body.outputs)]
        self.rows = self._find_rows(test)
        unit = planner.unit_of(self.rows)
        counts = [one.elements.count for one in values if one.elements is not None]
        # Otherwise it may be a number that happens to be a multiple of the rows.
        is_certain = isinstance(self.rows, Dim) or self.rows in counts
        if unit is None or planner.is_joined or not is_certain:
            raise NeedsOthers
        self.unit = unit

    def _find_rows(self, test: Any) -> Any:
        """How often it runs: the bound of all its counters, which begin at 0."""
        if any(one.type not in _OF_TEST for one in test.get_operations()):
            raise NeedsOthers
        place = {id(tensor): number for number, tensor in enumerate(test.inputs)}
        bounds = set()
        for one in test.get_operations():
            if one.type == "Less":
                counter, bound = (origin(tensor) for tensor in one.inputs)
                number = place.get(id(counter))
                if number is None or self.kinds[number] != COUNTER or self._start(number) != 0:
                    raise NeedsOthers
                bounds.add(self._bound(bound, place.get(id(bound))))
        if len(bounds) != 1:
            raise NeedsOthers
        return bounds.pop()

    def _start(self, number: int) -> Any:
        const = self.values[number].const
        assert const is not None
        return const[()]

    def _bound(self, tensor: tf.Tensor, number: int | None) -> Any:
        """What a counter is compared with: a number, or the same in all iterations."""
        if number is None:
            return int(tf.get_static_value(tensor))
        if self.kinds[number] != SAME or self.values[number].const is None:
            raise NeedsOthers
        return self._start(number)

    def plan(self) -> list[Value]:
        """Its results."""
        states = [self._state(*one) for one in zip(self.kinds, self.values)]
        while True:
            inner = _Iteration(self.planner)
            inside = [self._inside(inner, *one) for one in enumerate(states)]
            results = inner.run(self.body, inside)
            after = [self._joined(inner, *one) for one in zip(self.kinds, states, results)]
            if after == states:
                return self._added(inner, states, results)
            states = after

    def _state(self, kind: str, value: Value) -> State | None:
        layout = LISTED if kind == LIST else WHOLE
        return None if kind == SAME else State(layout, value.dims, None, value.elements)

    def _inside(self, inner: _Iteration, number: int, state: State | None) -> Value:
        value = self.values[number]
        if state is None:
            return inner.take(value)
        item = Item(value.dtype, EACH)
        inner.program.inputs.append(item)
        found = Value(value.dtype, state.dims, state.layout, {state.layout: item})
        is_row = self.kinds[number] == COUNTER and self._start(number) == 0
        found.elements, found.row_of = state.elements, self.rows if is_row else None
        return found

    def _joined(self, inner: Inner, kind: str, state: State | None, result: Value) -> State | None:
        if state is None:
            return None
        own = state_of(inner, result)
        if kind == LIST:
            if result.layout != LISTED:
                raise NeedsOthers
            return dataclasses.replace(
                state, elements=joined_elements(state.elements, own.elements)
            )
        if own.dims != state.dims:
            raise NeedsOthers
        return state

    def _added(self, inner: Inner, states: list[State | None], results: list[Value]) -> list[Value]:
        """Adds it to the program."""
        kept, tensors = carried(states, states), carried(self.op.outputs, states)
        layouts: list[Layout] = [state.layout for state in kept]
        inner.give(carried(results, states), layouts)
        first = [
            self.planner.get(value, LISTED if kind == LIST else SUM)
            for kind, value in zip(self.kinds, self.values)
            if kind in (LIST, ADDEND)
        ]
        taken, work = Inner.common([inner]), elements_of([self.rows])
        inner.records = [
            dataclasses.replace(one, how="spread", work=one.work * work) for one in inner.records
        ]

        inner.program.unbound |= self.unit.symbols

        def emit(local: Any, *given: Any) -> list[Any]:
            return self._write(local, given, inner, inner.shapes(kept, tensors))

        kinds = [kind for kind in self.kinds if kind != SAME]
        layouts = [SUM if kind == ADDEND else one for kind, one in zip(kinds, layouts)]
        made = iter(inner.added(emit, first, layouts, kept, self.op, taken, tensors))
        return [
            self.values[number] if state is None else self._result(number, next(made))
            for number, state in enumerate(states)
        ]

    def _write(
        self, local: Any, given: Sequence[Any], inner: Inner, specs: Sequence[tf.TensorShape]
    ) -> list[Any]:
        """A device's loop: its counters begin at the first of its rows."""
        rest, begin = iter(given), local.first_entry(self.unit)
        numbers = [number for number, kind in enumerate(self.kinds) if kind != SAME]
        variables = [
            self._count(local, number, begin) if self.kinds[number] == COUNTER else next(rest)
            for number in numbers
        ]
        captured = [one if one.dtype == tf.resource else tf.identity(one) for one in rest]
        place = next(place for place, n in enumerate(numbers) if self.kinds[n] == COUNTER)
        last = self._count(local, numbers[place], begin + local.entries(self.unit))
        return while_loop(
            self.op,
            lambda *flat: flat[place] < last,
            lambda *flat: inner.write(local, [*flat, *captured]),
            variables,
            specs,
            self.op.name,
        )

    def _count(self, local: Any, number: int, row: Any) -> Any:
        """What a counter is at a row."""
        dtype = self.values[number].dtype
        return tf.cast(row, dtype) + tf.cast(local.dim(self._start(number)), dtype)

    def _result(self, number: int, made: Value) -> Value:
        if self.kinds[number] != COUNTER:
            return made
        return Value(made.dtype, (), const=constant_of(self._start(number) + self.rows))


def _kind(value: Value, given: tf.Tensor, made: tf.Tensor) -> str:
    """What a variable of a loop is; only its values before are known of it."""
    if origin(made) is given:
        return SAME
    if given.dtype == tf.variant:
        return LIST
    adds, own = origin(made).op, [one is given for one in map(origin, origin(made).op.inputs)]
    if adds.type not in _ADDS or sum(own) != 1 or not _is_used_once(given):
        raise NeedsOthers
    if value.const is not None and value.const.ndim == 0:
        steps = [tf.get_static_value(t) for t, is_own in zip(adds.inputs, own) if not is_own]
        if steps != [1]:
            raise NeedsOthers
        return COUNTER
    if not value.dtype.is_floating:
        raise NeedsOthers
    return ADDEND


def _is_used_once(tensor: tf.Tensor) -> bool:
    """Whether a sum's value goes into the addition alone; a counter may be used anywhere."""
    if tensor.dtype.is_integer:
        return True
    users = list(tensor.consumers())
    if len(users) == 1 and users[0].type == "Identity":
        return _is_used_once(users[0].outputs[0])
    return len(users) == 1
