"""Single operations: written into a graph, and their rough cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Layout, Split, Value
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import SAMPLE, Unit, elements_of, symbols_of


@dataclasses.dataclass(frozen=True)
class Shaped:
    """A small integer tensor that is made anew: with a layout, the shape of a device's part."""

    dims: Sequence[Any]
    dtype: tf.DType
    layout: Layout | None = None

    @property
    def symbols(self) -> set[str]:
        """The symbols in it."""
        return symbols_of(self.dims)

    def tensor(self, local: Any) -> tf.Tensor:
        """The tensor, for the device of `local`."""
        return local.shape(self.dims, self.dtype, self.layout)


@dataclasses.dataclass(frozen=True)
class Guard:
    """Of a kernel that may not be trusted with no rows: whose rows, and its outputs' shapes."""

    unit: Unit
    shapes: Sequence[Shaped]

    @property
    def symbols(self) -> set[str]:
        """The symbols in it."""
        return self.unit.symbols.union(*(one.symbols for one in self.shapes))


_COMPILED = "_XlaMustCompile"  # the mark of a call of a function that XLA has to compile
# Random numbers that XLA draws otherwise than TensorFlow.
_DRAWS = re.compile("Stateless(Random(?!Get)|TruncatedNormal|Multinomial|Parameterized)")


def attributes_of(op: tf.Operation) -> dict[str, Any]:
    """An operation's attributes, without TensorFlow's marks; but XLA compiles what it has to."""
    marked = op.node_def.attr.items()
    return {name: one for name, one in marked if name == _COMPILED or not name.startswith("_")}


def is_compiled_call(op: tf.Operation) -> bool:
    """Whether an operation calls a function that XLA has to compile."""
    marks = op.node_def.attr
    return _COMPILED in marks and marks[_COMPILED].b


def create(
    kind: str, inputs: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
) -> list[tf.Tensor]:
    """Adds an operation to the graph that is being built; returns its outputs."""
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(kind, list(inputs), attrs=dict(attributes), name=name).outputs


def create_compiled(kind: str, inputs: Sequence[Any], *more: Any) -> list[tf.Tensor]:
    """As `create`, in a function of its own that XLA compiles: it draws other random numbers.

    TensorFlow would draw its own by a constant seed, to fold them, but for a zero it can't know.
    """
    place = 2 if "Multinomial" in kind else 1  # of the seed, or the key

    def draw() -> list[tf.Tensor]:
        zero = tf.raw_ops.RandomUniformInt(
            shape=tf.constant([], tf.int32), minval=0, maxval=1, seed=1, seed2=1
        )
        seed = inputs[place] + tf.cast(zero, inputs[place].dtype)
        return create(kind, [*inputs[:place], seed, *inputs[place + 1 :]], *more)

    return list(tf.function(draw, autograph=False, jit_compile=True)())


def operation(
    op: tf.Operation,
    shapes: Mapping[int, Shaped] = {},
    signature: Signature | None = None,
    guard: Guard | None = None,
) -> Callable[..., list[Any]]:
    """A function that writes a traced operation anew, for one device.

    `guard`: for a kernel that may not be trusted with no rows.
    """
    kind, write, attributes = op.type, create, attributes_of(op)
    functions = _functions_of(op, attributes)
    if signature is not None:
        write = signature.write or create
        kind = signature.kind or kind
        attributes = {**attributes, **signature.attributes}
        attributes = {name: one for name, one in attributes.items() if one is not None}
    count, name = len(op.inputs), op.name
    types = [tensor.dtype for tensor in op.outputs]
    ranks = [tensor.shape.rank for tensor in op.outputs]

    def emit(local: Any, *tensors: Any) -> list[Any]:
        made = written(local, *tensors)
        for tensor, rank in zip(made, ranks):
            if rank is not None and tensor.shape.rank is None:  # code has set it
                tensor.set_shape([None] * rank)
        return made

    def written(local: Any, *tensors: Any) -> list[Any]:
        rest = iter(tensors)
        for one in functions:
            one.add_to_graph(tf.compat.v1.get_default_graph())
        inputs = [shapes[i].tensor(local) if i in shapes else next(rest) for i in range(count)]
        if local.is_compiled and _DRAWS.match(kind):
            return create_compiled(kind, inputs, attributes, name)
        if local.is_compiled and signature is not None and signature.write_compiled is not None:
            return signature.write_compiled(kind, inputs, attributes, name)
        written_empty = None if signature is None else signature.write_empty
        # XLA's kernels may be trusted, where the shape of zeros isn't known.
        if guard is None or (local.is_compiled and written_empty is not None):
            return write(kind, inputs, attributes, name)
        zeros = [(one.tensor(local), dtype) for one, dtype in zip(guard.shapes, types)]

        def empty() -> list[Any]:
            if written_empty is not None:
                return written_empty(kind, inputs, attributes, name)
            return [tf.zeros(shape, dtype) for shape, dtype in zeros]

        return local.unless_empty(guard.unit, lambda: write(kind, inputs, attributes, name), empty)

    return emit


def guard_of(signature: Signature, label: Any, unit: Unit | None) -> Guard | None:
    """That of an operation which is split along a label; `None` if it needs none."""
    if label is None or unit is None or label not in signature.zero_if_empty:
        return None
    if signature.write_empty is not None:
        return Guard(unit, ())
    assert signature.dims is not None
    layouts = [Split(list(one).index(label)) if label in one else None for one in signature.outputs]
    shapes = [Shaped(dims, tf.int32, layout) for dims, layout in zip(signature.dims, layouts)]
    return Guard(unit, shapes)


def _functions_of(op: tf.Operation, attributes: Mapping[str, Any]) -> list[Any]:
    """The functions that it calls which only its graph knows: those of `tf.compat.v1`'s kind."""
    names = [one.func.name for one in attributes.values() if one.HasField("func")]
    functions = [op.graph._get_function(name) for name in names]
    return [one for one in functions if one is not None and not hasattr(one, "graph")]


# The last: the host looks up, wherever the rows are.
_NO_WORK = frozenset(
    {"Const", "Identity", "IdentityN", "Reshape", "Shape", "ReadVariableOp", "NoOp", "ExpandDims"}
    | {"LookupTableFindV2"}
)


def work_of(
    op: tf.Operation, inputs: Sequence[Value], outputs: Sequence[Value], batch: Any
) -> float:
    """A rough number of floating-point operations; what isn't known counts as the batch's rows."""
    size = functools.partial(elements_of, sample=batch if isinstance(batch, int) else SAMPLE)
    if op.type in _NO_WORK or not outputs:
        return 0.0
    of_result = sum(size(one.dims) for one in outputs)
    sizes = [size(one.dims) for one in inputs if one.dtype not in (tf.resource, tf.variant)]
    if op.type in ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum") and len(sizes) == 2:
        return 2 * math.sqrt(max(1.0, sizes[0] * sizes[1] * of_result))  # exact for (m, k) x (k, n)
    if op.type.startswith("CudnnRNN"):  # its parameters, for each step of each sequence
        return 2 * sizes[3] * size((inputs[0].dims or ())[:2])
    if op.type.startswith(("Conv", "Depthwise")) and inputs[0].dims is not None:
        return _convolution(op, inputs, outputs, size)
    return max([of_result, *sizes])


def _convolution(
    op: tf.Operation,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    size: Callable[[Any], float],
) -> float:
    is_of_filter = "BackpropFilter" in op.type
    kernel = outputs[0] if is_of_filter else inputs[1]
    result = inputs[2] if "Backprop" in op.type else outputs[0]
    if not kernel.dims or not result.dims:
        return 0.0
    of_one = size(kernel.dims) / max(1.0, size(kernel.dims[-1:]))
    if "Depthwise" in op.type:
        of_one = size(kernel.dims[:-2])
    return 2 * of_one * size(result.dims)
