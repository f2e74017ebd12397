"""Functions within a step: their plans, and what they take from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.chosen import Chosen
from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.emission import write, write_local
from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    ONE_DEVICE,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Copied,
    Layout,
    Partial,
    Sharded,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.order import has_effect
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.program import ALL, EACH, Item
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dim
from keras_multigpu.engines.tensorflow.partition.states import State, is_of_own_rows, state_of


class Inner(Planner):
    """Plans a function that an operation of the step calls.

    Args:
        outer: plans the step around.
        way: `EACH_DEVICE`, `ALL_DEVICES` or `ONE_DEVICE`.
        branch: the number of a branch, which may not run: what it takes is brought to it inside.
    """

    is_within = True

    def __init__(self, outer: Planner, way: str, *, branch: int | None = None):
        super().__init__(outer.rules, outer.count, outer.batch, [], way=way, names=outer.names)
        self.outer, self.branch = outer, branch
        self.shards, self.shares, self.is_joined = outer.shards, outer.shares, outer.is_joined
        self.expected, self.splits = outer.expected, self.splits and outer.splits
        self.has_row_loops, self.rows = outer.has_row_loops, outer.rows
        self.splits_all = outer.splits_all and way == ALL_DEVICES
        self.chosen = None
        if outer.chosen is not None and way != ONE_DEVICE:
            self.chosen = Chosen(self.names, are_fixed=outer.chosen.are_fixed)
        self._origins: dict[int, tuple[Value, Value]] = {}  # by the id of our value: it, the outer
        self.only_read: set[int] = set()  # our variables that nothing within changes
        self.taken: dict[int, tuple[Item, Item]] = {}  # by the id of the outer item: it, and ours

    # What comes from outside

    @property
    def own_symbols(self) -> set[str]:
        return set(self.program.symbols)

    def take(self, value: Value) -> Value:
        """An outer value, inside: what is asked for is taken in the layout that is asked for."""
        if value.const is not None:
            return Value(value.dtype, value.dims, const=value.const)
        if self.branch is not None and self.way == ALL_DEVICES and value.make is None:
            forms = {layout: self.taken_item(item) for layout, item in value.forms.items()}
            found = Value(value.dtype, value.dims, value.layout, forms, elements=value.elements)
            found.is_state, found.is_update = value.is_state, value.is_update
            found.variable = value.variable
            return found

        def make(layout: Layout) -> Item | None:
            if isinstance(layout, Partial):
                return None
            if isinstance(layout, Split) and not self._has_rows(value, layout):
                return None
            return self.taken_item(self.outer_item(value, layout))

        is_split = value.axis is not None and self.way != ONE_DEVICE
        is_split = is_split or (value.is_sharded and self.way == ALL_DEVICES)
        layout = value.layout if is_split else WHOLE
        mine = Value(value.dtype, value.dims, layout, {}, make, elements=value.elements)
        mine.is_state, mine.is_update = value.is_state, value.is_update
        mine.variable = value.variable
        self._origins[id(mine)] = mine, value
        return mine

    def outside(self, value: Value) -> Value | None:
        _, outer = self._origins.get(id(value), (value, None))
        if outer is None or (self.way == ALL_DEVICES and id(value) not in self.only_read):
            return None
        return outer if self.way != ONE_DEVICE or outer.is_sharded else None

    def _has_rows(self, value: Value, layout: Split) -> bool:
        if self.way == ONE_DEVICE:
            return False
        if value.elements is not None or value.dtype == tf.variant:
            return value.layout == layout or value.make is not None
        dims = value.dims or ()
        return layout.axis < len(dims) and self.unit_of(dims[layout.axis]) is not None

    def outer_item(self, value: Value, layout: Layout = WHOLE) -> Item:
        """The item outside that has a value in a layout."""
        if isinstance(layout, (Whole, Copied)):
            layout = COPIED if self.way == EACH_DEVICE or isinstance(layout, Copied) else WHOLE
            if self.way == ONE_DEVICE:
                layout = WHOLE
        if self.outer.way != ALL_DEVICES and isinstance(layout, Copied):
            layout = WHOLE
        if value.dtype == tf.variant and value.axis is not None and value.layout != layout:
            raise NeedsOthers  # a split list as a whole
        return self.outer.get(value, layout)

    def taken_item(self, item: Item) -> Item:
        """Our item for an outer one."""
        if id(item) not in self.taken:
            place = item.place if self.way == ALL_DEVICES else EACH
            mine = Item(item.dtype, place)
            self.taken[id(item)] = item, mine
            self.program.inputs.append(mine)
        return self.taken[id(item)][1]

    @staticmethod
    def common(inners: Sequence[Inner]) -> list[Item]:
        """The outer items that functions take; afterwards all take them, in this order.

        So do they with the symbols of sizes that are found outside.
        """
        items: dict[int, Item] = {}
        unbound = set().union(*(inner.program.unbound for inner in inners))
        for inner in inners:
            inner.program.unbound = unbound
            items.update((key, outer) for key, (outer, _) in inner.taken.items())
        for inner in inners:
            own = [item for item in inner.program.inputs if item not in _mine(inner)]
            for item in items.values():
                inner.taken_item(item)
            inner.program.inputs = own + [inner.taken[key][1] for key in items]
        return list(items.values())

    def carried(self, state: State, tensor: tf.Tensor) -> Value:
        """A variable of a loop."""
        is_each = self.way != ALL_DEVICES or not isinstance(state.layout, Whole)
        item = Item(tensor.dtype, EACH if is_each else 0)
        self.program.inputs.append(item)
        if state.const is not None and state.dims is not None:
            const = constant_of(state.const, state.dims)
            return Value(tensor.dtype, state.dims, const=const)
        if tensor.dtype == tf.variant:
            # A whole list that the body finds to be split has another state in the next round.
            forms: dict[Layout, Item] = {state.layout: item}

            def make(layout: Layout) -> Item | None:
                if self.way != ALL_DEVICES:
                    return item
                return Item(tensor.dtype, EACH) if isinstance(layout, Split) else None

            return Value(tensor.dtype, None, state.layout, forms, make, elements=state.elements)
        return self.value(tensor.dtype, state.dims, state.layout, item)

    # Planning

    def run(self, graph: Any, values: Sequence[Value]) -> list[Value]:
        """Plans the function."""
        return self.run_graph(graph, dict(zip(map(id, graph.inputs), values)), graph.outputs)

    def kept(self, value: Value) -> Layout:
        """The layout in which a result goes outside."""
        is_kept = isinstance(value.layout, (Split, Sharded, Partial)) and self.way != ONE_DEVICE
        return value.layout if is_kept and not is_of_own_rows(value, self.own_symbols) else WHOLE

    def give(self, results: Sequence[Value], layouts: Sequence[Layout]) -> None:
        """Sets what the function gives."""
        self.program.outputs = [self.get(v, layout) for v, layout in zip(results, layouts)]

    def added(
        self,
        emit: Any,
        first: Sequence[Item],
        layouts: Sequence[Layout],
        results: Sequence[Any],
        op: tf.Operation,
        taken: Sequence[Item] | None = None,
        tensors: Sequence[tf.Tensor] | None = None,
    ) -> list[Value]:
        """Adds the function's node to the program outside; returns the values of its results."""
        taken = Inner.common([self]) if taken is None else taken
        tensors = op.outputs if tensors is None else tensors
        place = {EACH_DEVICE: EACH, ALL_DEVICES: ALL, ONE_DEVICE: 0}[self.way]
        items = self.outer.add(
            emit,
            [*first, *taken],
            place,
            [tensor.dtype for tensor in tensors],
            name=op.name,
            symbols=self.program.unbound,
            after=0 if place == EACH else self.outer.after(op, place),
            has_effect=has_effect(op),
        )
        for item, layout in zip(items, layouts if place == ALL else ()):
            item.place = 0 if isinstance(layout, Whole) else EACH
        self.outer.records.extend(self.records)
        return [
            self._outside(result, layout, item, tensor)
            for result, layout, item, tensor in zip(results, layouts, items, tensors)
        ]

    def _outside(self, result: Any, layout: Layout, item: Item, tensor: tf.Tensor) -> Value:
        state = state_of(self, result) if isinstance(result, Value) else result
        dims = state.dims
        if tensor.dtype in (tf.variant, tf.resource):
            dims = None
        elif dims is None:
            dims = static_dims(tensor)
        form = layout
        if isinstance(layout, Whole) and item.is_each and self.outer.way == ALL_DEVICES:
            form = COPIED
        value = Value(tensor.dtype, dims, layout, {form: item}, elements=state.elements)
        if state.const is not None and dims is not None and None not in dims:
            value.const = constant_of(state.const, dims)
        return self.outer.with_symbols(value)

    # Emission

    def write(self, scope: Any, given: Sequence[Any]) -> list[Any]:
        """Writes the function's program into the graph that is being built."""
        if self.way == ALL_DEVICES:
            return write(self.program, scope.inner(), given)
        return write_local(self.program, scope.inner(), given)

    def unflat(self, tensors: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """The tensors of these layouts, each one or a list of one for each device."""
        if self.way != ALL_DEVICES:
            return list(tensors)
        rest = iter(tensors)
        return [
            next(rest) if isinstance(one, Whole) else [next(rest) for _ in range(self.count)]
            for one in layouts
        ]

    def shapes(self, states: Sequence[State], tensors: Sequence[tf.Tensor]) -> list[tf.TensorShape]:
        """The static shapes of a loop's variables, flat."""
        found = []
        for state, tensor in zip(states, tensors):
            shape = tf.TensorShape(None)
            if tensor.dtype != tf.variant and state.dims is not None:
                axis = getattr(state.layout, "axis", None)
                static = [
                    None if isinstance(d, Dim) or number == axis else d
                    for number, d in enumerate(state.dims)
                ]
                shape = tf.TensorShape(static)
            is_one = isinstance(state.layout, Whole) or self.way != ALL_DEVICES
            found += [shape] * (1 if is_one else self.count)
        return found


def _mine(inner: Inner) -> list[Item]:
    return [mine for _, mine in inner.taken.values()]
