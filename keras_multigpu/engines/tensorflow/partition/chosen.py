"""What a step chooses of the batch's rows: micro-batches, masked rows, the rows of an expert.

How many they are is known when the step runs. What is chosen likewise, of inputs and of targets,
say, has as many rows: one symbol stands for their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.operations import attributes_of
from keras_multigpu.engines.tensorflow.partition.sizes import ROWS, is_known, product

CHOOSES: dict[str, int | None] = {
    **dict.fromkeys(("StridedSlice", "Slice", "SplitV", "TopKV2", "GatherV2", "Reshape"), 0),
    "DynamicPartition": 0,
    "Split": 1,
    **dict.fromkeys(("Where", "EagerPyFunc", "PyFunc", "PyFuncStateless")),
    **dict.fromkeys(("RaggedRange", "RaggedGather")),
    **dict.fromkeys(f"NonMaxSuppressionV{number}" for number in (3, 4, 5)),
}
"""{type of an operation that chooses: the input of which only the dimensions count}."""


def known_rows(op: tf.Operation, values: Sequence[Value], dims: Sequence[Any]) -> int | None:
    """The axis of the rows of a result of known dimensions; `None` if the operation cuts none."""
    cut = CHOOSES.get(op.type)
    old = () if cut is None else values[cut].dims or ()
    axis = None if cut is None else values[cut].axis
    if axis is None or not is_known(old):  # where rows have a symbol, numbers are none of rows
        return None
    if op.type == "GatherV2":
        return axis if len(dims) == len(old) and dims[axis] > 1 else None
    if op.type != "Reshape":
        return axis if len(dims) == len(old) and 1 < dims[axis] < old[axis] else None
    for end in range(1, len(dims) + 1):  # the longest of the axes that the rows become
        if product(dims[:end]) == product(old[: axis + 1]):
            return max(range(end), key=lambda one: dims[one])
    return None


def _keeps_axes(op: tf.Operation) -> bool:
    """Whether an axis of what is cut is the same one of the result."""
    masks = [f"{name}_mask" for name in ("ellipsis", "new_axis", "shrink_axis")]
    is_slice = op.type == "StridedSlice"
    return op.type != "Reshape" and not (is_slice and any(map(op.get_attr, masks)))


class Chosen:
    """Names for the numbers of rows that operations choose.

    Args:
        names: numbers for the names.
        are_fixed: whether only those are chosen that follow from the batch's, for XLA.
    """

    def __init__(self, names: Iterator[int], *, are_fixed: bool = False):
        self._names, self.are_fixed = names, are_fixed
        self._symbols: dict[Any, str] = {}
        self._numbers: dict[Any, int] = {}  # the same for what is computed likewise
        self._known: dict[int, tuple[Value, int]] = {}  # by the value's id
        self._fixed: set[int] = set()  # the numbers of what follows from dimensions

    def note(self, op: tf.Operation, values: Sequence[Value], made: Sequence[Value]) -> None:
        """Notes how integers and truth values are computed."""
        wanted = [
            (place, one)
            for place, one in enumerate(made)
            if one.const is None and (one.dtype.is_integer or one.dtype == tf.bool)
        ]
        if not wanted or op.op_def.is_stateful:
            return
        inputs = list(map(self._of, values))
        new = [(place, one) for place, one in wanted if id(one) not in self._known]
        key = self._key(op, inputs)
        for place, one in new:
            number = self._number((key, place))
            self._known[id(one)] = one, number
            if inputs and self._fixed.issuperset(inputs):
                self._fixed.add(number)

    def symbol(
        self, op: tf.Operation, values: Sequence[Value], output: int, axis: int
    ) -> str | None:
        """The name of the length of an output's axis; `None` if it has none of the rows.

        Of numbers that are computed of rows, it has some. An update's rows are a table's.
        """
        is_choice = op.type in CHOOSES or op.outputs[output].dtype.is_floating
        if not is_choice or any(v.dtype == tf.string or v.is_update for v in values):
            return None
        output = 0 if op.type in ("Split", "TopKV2") else output  # all are as long
        inputs: list[Any] = [self._of(value) for value in values]
        cut = CHOOSES.get(op.type)
        if self.are_fixed and not all(
            one in self._fixed for number, one in enumerate(inputs) if number != cut
        ):
            return None
        if cut is not None:
            dims = values[cut].dims or ()
            inputs[cut] = ("dims", *(dims[:1] if axis == 0 and _keeps_axes(op) else dims))
        key = self._key(op, inputs), output, axis
        if key not in self._symbols:
            self._symbols[key] = f"{ROWS}{next(self._names)}"
        return self._symbols[key]

    def _key(self, op: tf.Operation, inputs: Sequence[Any]) -> Any:
        """What operations have in common that do the same."""
        types = {"T", "Tparams", "Tindices"}  # of the tensor that is cut
        attributes = {name: one for name, one in attributes_of(op).items() if name not in types}
        settings = [(name, one.SerializeToString()) for name, one in sorted(attributes.items())]
        return (op.type, id(op) if op.op_def.is_stateful else None, *settings, *inputs)

    def _of(self, value: Value) -> int:
        """A value's number, that of all that are computed as it is."""
        if value.const is not None:
            number = self._number(("const", value.const.shape, *value.const.flat))
            self._fixed.add(number)
            return number
        if id(value) not in self._known:
            self._known[id(value)] = value, self._number(("value", id(value)))
        return self._known[id(value)][1]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
