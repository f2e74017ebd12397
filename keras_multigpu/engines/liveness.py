"""The memory that operations need while they run one after the other, by device and kind."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"

Peaks = dict[str, dict[str, int]]
"""The bytes of each kind when a device holds most, by device."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, as its memory sees it.

    Attributes:
        inputs: the names of the tensors that it reads.
        outputs: the names of the tensors that it makes, with their bytes.
        device: where these are.
        is_backward: whether it belongs to the backward pass.
        is_view: whether it only shows its inputs in another form, in their memory.
        is_sum: whether its outputs are sums, parts or copies of its inputs, and of their kind.
        may_overwrite: whether it may write its result over an input that nothing else reads later.
        is_kept: whether its outputs stay in memory until the end.
        kind: the kind of its outputs; `None` to find it from who reads them.
    """

    inputs: Sequence[str]
    outputs: Sequence[tuple[str, int]]
    device: str = ""
    is_backward: bool = False
    is_view: bool = False
    is_sum: bool = False
    may_overwrite: bool = False
    is_kept: bool = False
    kind: str | None = None


def find_peaks(operations: Sequence[Operation]) -> Peaks:
    """What each device holds at its fullest moment, if the operations run in this order.

    Tensors that no operation makes (arguments, variables) need no memory here.
    """
    readers = collections.Counter(name for one in operations for name in one.inputs)
    kinds, memory = _find_kinds(operations), _Memory()
    places: dict[str, list[_Block]] = {}  # of each tensor
    for one in operations:
        read = [block for name in one.inputs for block in places.get(name, ())]
        for name, size in one.outputs:
            made = read if one.is_view else [memory.find(one, size, kinds[name], read)]
            for block in made:
                block.readers += 1 + readers[name] + one.is_kept  # itself, until it ends
            places[name] = made
        memory.release(read)
        memory.release(block for name, _ in one.outputs for block in places[name])
    return memory.peaks


def _find_kinds(operations: Sequence[Operation]) -> dict[str, str]:
    """The kind of each tensor: the backward pass keeps activations, and the update gradients."""
    passes: dict[str, set[bool]] = collections.defaultdict(set)  # who reads it, or its sums
    kinds: dict[str, str] = {}
    for one in reversed(operations):
        for name, _ in one.outputs:
            leaves = (not one.is_backward) in passes[name]
            found = GRADIENTS if one.is_backward else ACTIVATIONS
            kinds[name] = one.kind or (found if leaves else TEMPORARIES)
        hands_on = one.is_view or one.is_sum
        seen = [passes[name] for name, _ in one.outputs] if hands_on else [{one.is_backward}]
        for name in one.inputs:
            passes[name].update(*seen)
    return kinds


@dataclasses.dataclass
class _Block:
    """A piece of memory; it is free again when nothing has still to read it."""

    bytes: int
    kind: str
    device: str
    readers: int = 0


class _Memory:
    """The memory in use, and the fullest moment of each device so far."""

    def __init__(self) -> None:
        self.peaks: Peaks = {}
        self._used: Peaks = {}

    def find(self, one: Operation, size: int, kind: str, read: Sequence[_Block]) -> _Block:
        """The block for a result: one of an input, or a new one."""
        for block in read if one.may_overwrite else ():
            if (block.readers, block.bytes, block.device) == (1, size, one.device):
                self._add(block, -1)
                block.kind = kind
                self._add(block, 1)
                return block
        block = _Block(size, kind, one.device)
        self._add(block, 1)
        return block

    def release(self, blocks: Iterable[_Block]) -> None:
        """Notes that a reader of each block is done; without readers, its memory is free."""
        for block in blocks:
            block.readers -= 1
            if block.readers == 0:
                self._add(block, -1)

    def _add(self, block: _Block, sign: int) -> None:
        used = self._used.setdefault(block.device, {})
        used[block.kind] = used.get(block.kind, 0) + sign * block.bytes
        if sum(used.values()) > sum(self.peaks.get(block.device, {}).values()):
            self.peaks[block.device] = dict(used)
