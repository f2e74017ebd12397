"""What the devices compute: the nodes of a program, in order, with the items they pass on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_multigpu.engines.tensorflow.partition.sizes import BATCH

EACH = -1
"""The place of what every device computes on its own part."""

ALL = -2
"""The place of what takes, or gives, the parts of all devices: crossings."""

Emit = Callable[..., Sequence[Any]]


@dataclasses.dataclass(eq=False)
class Item:
    """A tensor of the program: on the device `place`, or one on each device (`EACH`)."""

    dtype: Any
    place: int
    level: int = 0
    node: Node | None = None

    @property
    def is_each(self) -> bool:
        """Whether every device has its own."""
        return self.place == EACH

    @property
    def is_free(self) -> bool:
        """Whether each region that uses it computes it."""
        return self.node is not None and self.node.is_free

    @property
    def is_local(self) -> bool:
        """Whether a region computes it, so that others get it only after the region."""
        return self.node is not None and self.node.place == EACH


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that is copied to all devices, whose addends are summed, or parts gathered.

    Attributes:
        kind: `"copy"`, `"sum"` or `"gather"`.
        shape: its shape, which its parts may not know in the graph; `None` if not known.
        is_trained: whether it is a weight, or a gradient: it may cross in another type.
    """

    kind: str
    shape: tuple[int, ...] | None
    is_trained: bool

    @property
    def size(self) -> int | None:
        """Its elements; `None` if not known."""
        return None if self.shape is None else math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Across:
    """What joined processes make together of what each has: many such tensors cross in one go.

    Attributes:
        kind: how addends are reduced, such as `"sum"`; `"gather"`, for parts; or `"scatter"`, for
            addends of whose sum each process gets its part.
        axis: that of the parts.
        dim: its length.
    """

    kind: str
    axis: int = 0
    dim: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """A step of a program.

    Attributes:
        emit: takes a `Local` (for `ALL`: the `Devices`) and the inputs' tensors; gives the outputs.
        inputs: the items it takes.
        place: a device's number, `EACH` or `ALL`.
        name: of the traced operation, for people.
        sizes: for each symbol of dimensions that it uses: an item, and the axis of that size.
        column: of the devices, if they are a mesh: the devices of this column compute it.
        level: how many crossings lie before it.
        crossing: what crosses, for crossings that may go through hubs.
        across: what it makes with other processes, of what they have of it.
        is_free: whether it takes nothing and costs little: each region that uses it computes it.
        is_plain: whether XLA may compile it with others around it.
        has_effect: whether it is computed even if nobody takes its outputs.
        outputs: the items it gives.
    """

    emit: Emit
    inputs: Sequence[Item]
    place: int
    name: str
    sizes: Mapping[str, tuple[Item, int]]
    column: int = 0
    level: int = 0
    is_free: bool = False
    is_plain: bool = False
    crossing: Crossing | None = None
    across: Across | None = None
    has_effect: bool = False
    outputs: list[Item] = dataclasses.field(default_factory=list)

    @property
    def needs(self) -> list[Item]:
        """All items that it takes."""
        return [*self.inputs, *(item for item, _ in self.sizes.values())]


@dataclasses.dataclass
class Program:
    """The nodes of a graph, in an order in which inputs come first.

    Attributes:
        nodes: all of them.
        inputs: the items that the caller gives.
        outputs: the items that the caller gets.
        symbols: where the size of a symbol is found: an item and its axis.
        unbound: symbols that are found outside.
        column: of the nodes that are added next.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    inputs: list[Item] = dataclasses.field(default_factory=list)
    outputs: list[Item] = dataclasses.field(default_factory=list)
    symbols: dict[str, tuple[Item, int]] = dataclasses.field(default_factory=dict)
    unbound: set[str] = dataclasses.field(default_factory=set)
    column: int = 0

    def add(
        self,
        emit: Emit,
        inputs: Sequence[Item],
        place: int,
        types: Sequence[Any],
        *,
        name: str = "",
        gives: int | None = None,
        symbols: Collection[str] = (),
        after: int = 0,
        is_cheap: bool = False,
        is_plain: bool = False,
        has_effect: bool = False,
        crossing: Crossing | None = None,
        across: Across | None = None,
    ) -> list[Item]:
        """Adds a node and returns its outputs, of these types.

        `gives`: where a crossing puts its outputs. `symbols`: of the dimensions that it uses.
        `after`: a level that it must not be before. `is_cheap`: whether it may be computed twice.
        The others: as of a `Node`.
        """
        symbols = {*symbols} - {BATCH}
        sizes = {one: self.symbols[one] for one in symbols if one in self.symbols}
        self.unbound.update(one for one in symbols if one not in self.symbols)
        # What crosses is sent from where it is made.
        made = inputs[0].node if place == ALL and len(inputs) == 1 else None
        node = Node(emit, inputs, place, name, sizes, made.column if made else self.column)
        node.is_free = is_cheap and place == EACH and all(one.is_free for one in node.needs)
        node.is_plain, node.has_effect = is_plain and not sizes, has_effect
        node.crossing, node.across = crossing, across
        assert place == ALL or all(one.is_each == (place == EACH) for one in inputs), name
        node.level = max([after, *(_level_after(one, node) for one in node.needs)])
        where = place if gives is None else gives
        node.outputs = [Item(one, where, node.level, node) for one in types]
        self.nodes.append(node)
        return node.outputs


def _level_after(item: Item, node: Node) -> int:
    """The level of a node that needs an item: what a region computes, others get after it."""
    is_inside = node.place == EACH and (item.is_free or _column(item) == node.column)
    return item.level + (item.is_local and not is_inside)


def _column(item: Item) -> int | None:
    return None if item.node is None else item.node.column
