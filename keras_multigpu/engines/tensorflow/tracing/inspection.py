"""Searches a traced graph for operations that rule out slicing the batch.

TensorFlow's own state would change once per replica, random numbers without Keras's seeds would be
equal on all devices, and some custom gradients lose a replica's weights. An operation's name
begins with its layer's, so messages can name the layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor

_HARMLESS = re.compile(
    r"Placeholder.*|ReadVariableOp|VarHandleOp|ResourceGather(Nd)?|Stateful.*PartitionedCall|"
    r"PartitionedCall|(Stateless)?(If|While|Case)|Assert|PrintV2|NoOp|LookupTable(Find|Size).*|"
    r".*HashTable.*V2|Collective.*|VariableShape|SparseTensorDenseMatMul|Stateless.*|"
    r"TensorList.*|XlaLaunch|Const|_?(Arg|Retval)|EmptyTensorMap|CheckNumerics.*|FakeParam"
)
_STATE_IN_BODIES = re.compile(
    r"Assign.*VariableOp|Resource(Scatter|Sparse|StridedSliceAssign|Apply).*|.*PyFunc|"
    r"LookupTable(Insert|Import|Remove).*|Write.*Summary|(Stack|Queue|Barrier|TensorArray).*V3|"
    r"Random(?!Crop).*|Stateful(?!PartitionedCall|.*PartitionedCall).*|Multinomial|TruncatedNormal"
)
_DRAW = re.compile(r"Stateless(Random|Truncated|Parameterized|Multinomial|Shuffle).*")

_COUNTING = re.compile("(DynamicPartition|NonMaxSuppression|Ragged|Set|Unique|Where).*")


def find_obstacle(forward: Any, number: Tensor, weights: Iterable[Tensor]) -> str | None:
    """Why a template's batch can't be sliced, or `None`; `weights` are those that may train."""
    graph = forward.graph
    draws = (_fixed_draws(graph, number), _shuffles(graph))
    checks = (_outer_rows(forward), _state(graph), *draws, _lost(forward, weights))
    return next((reason for check in checks for reason in check), None)


def find_lost(forward: Any, weights: Iterable[Tensor]) -> str | None:
    """Why a replica's gradients by some weights would be lost, or `None`."""
    return next(_lost(forward, weights), None)


def depends_on(results: Iterable[Tensor], argument: Tensor) -> bool:
    """Whether tensors depend on an argument of their graph; a function's results on all of its."""
    return argument.op in ancestors(results)


def find_chained(results: Iterable[Tensor]) -> str | None:
    """Why a gradient of one result by another is lost if the graph is called, or `None`."""
    made = [_before_identity(one) for one in results if one.dtype.is_floating]
    for place, one in enumerate(made):
        others = {id(other) for other in [*made[:place], *made[place + 1 :]]}
        found = next((it for it in _differentiable_makers(one) if id(it) in others), None)
        if found is not None:
            return (
                f"an output is computed from another one, that of {layer_of(found.name)}, and only "
                "one device knows the gradient of one by the other, which the active tapes may ask "
                "for (if you take gradients by weights and inputs only, take them in a "
                "`tf.function`, by a tape that is not persistent)"
            )
    return None


def layer_of(name: str) -> str:
    """The layer of an operation, from the operation's name."""
    scope = name.rpartition("/")[0]
    return f"layer {scope!r}" if scope else "the model's `call`"


def _outer_rows(forward: Any) -> Iterator[str]:
    """Tensors captured from the calling function: not being arguments, they are not sliced."""
    for outer in forward.captured_inputs:
        is_value = outer.dtype not in (tf.resource, tf.variant)
        symbolic = not tf.is_tensor(outer) or not hasattr(outer, "numpy")
        if is_value and symbolic and outer.shape.rank != 0 and None in _axes(outer)[:1]:
            yield f"`call` uses the tensor {outer.name!r}, which is not among its arguments"


def _axes(tensor: Tensor) -> list[int | None]:
    return [None] if tensor.shape.rank is None else tensor.shape.as_list()


def _state(graph: Any) -> Iterator[str]:
    """Operations that have a TensorFlow state, or run Python code."""
    has_stateful_calls = False
    for operation in graph.get_operations():
        if operation.op_def is not None and operation.op_def.is_stateful:
            has_stateful_calls = True
            if not _HARMLESS.fullmatch(operation.type):
                yield _told(operation.type, operation.name)
    if has_stateful_calls:
        for body in graph.as_graph_def().library.function:
            for node in body.node_def:
                if _STATE_IN_BODIES.fullmatch(node.op):
                    yield _told(node.op, node.name)


def _told(kind: str, name: str) -> str:
    if re.match(r"(Random|Stateful|Multinomial|TruncatedNormal)", kind):
        return (
            f"{layer_of(name)} draws random numbers by TensorFlow's {kind}, which would be the "
            "same on every device (draw them by `keras.random` with a `SeedGenerator`)"
        )
    if "PyFunc" in kind:
        return (
            f"{layer_of(name)} runs Python code by {kind}, which may keep a state (use "
            "`tf.numpy_function(..., stateful=False)` if it keeps none)"
        )
    return (
        f"{layer_of(name)} changes a state of TensorFlow's by {kind}, once for each device (keep "
        "it in a variable of Keras's: `add_weight`)"
    )


def draws_numbers(graph: Any) -> bool:
    """Whether a graph, or a function that it calls, draws random numbers by Keras's seeds."""
    return _has_any(graph, _DRAW)


def counts_rows(graph: Any) -> bool:
    """Whether values in a graph, or in a function that it calls, say how many rows there are."""
    return _has_any(graph, _COUNTING)


def _has_any(graph: Any, kinds: re.Pattern[str]) -> bool:
    definition = graph.as_graph_def()
    bodies = (body.node_def for body in definition.library.function)
    return any(kinds.fullmatch(one.op) for one in itertools.chain(definition.node, *bodies))


def _fixed_draws(graph: Any, number: Tensor) -> Iterator[str]:
    """Random numbers per row whose seed is the same on all devices."""
    for operation in graph.get_operations():
        if not _DRAW.fullmatch(operation.type):
            continue
        drawn = operation.outputs[0]
        for_rows = not drawn.shape.is_fully_defined()
        if for_rows and number.op not in ancestors(list(operation.inputs)[1:]):
            yield (
                f"{layer_of(operation.name)} draws random numbers by a fixed seed, which would be "
                "the same on every device (use a `keras.random.SeedGenerator`)"
            )


def _shuffles(graph: Any) -> Iterator[str]:
    """Random orders of the rows: in a slice, rows would mix only with each other."""
    for operation in graph.get_operations():
        if operation.type != "TopKV2" or operation.inputs[0].shape.rank != 1:
            continue
        if any(_DRAW.fullmatch(op.type) for op in ancestors([operation.inputs[0]])):
            yield f"{layer_of(operation.name)} shuffles the rows of the batch"


def _lost(forward: Any, weights: Iterable[Tensor]) -> Iterator[str]:
    """Custom gradients that use weights which are not among their arguments."""
    reason = (
        "{} has a custom gradient (of `tf.custom_gradient`, say, or of a `keras.remat` outside of "
        "`call`) with weights that are not among its arguments"
    )
    makers = {one.op for one in weights if one.dtype.is_floating}
    graph = forward.graph.as_graph_def()
    returned = [one.name for one in forward.outputs]
    for name in _losing(graph.node, {maker.name for maker in makers}, returned):
        yield reason.format(layer_of(name))
    bodies = {body.signature.name: body for body in graph.library.function}
    for name, caller in _called_with(forward.graph, makers, bodies):
        body = bodies[name]
        floats = {one.name for one in body.signature.input_arg if tf.as_dtype(one.type).is_floating}
        if any(_losing(body.node_def, floats, body.ret.values())):
            yield reason.format(layer_of(caller))


def _losing(nodes: Any, arguments: set[str], returned: Iterable[str]) -> Iterator[str]:
    """The names of custom gradients in a graph, or a function's body, that lose arguments of it."""
    by_name = {node.name: node for node in nodes}
    used = {_end(one) for node in nodes for one in node.input} | set(map(_end, returned))
    for node in nodes:
        if node.op != "IdentityN" or "_gradient_op_type" not in node.attr:
            continue
        # The results come first; other operations use only these.
        ends = [_end(one) for one in node.input]
        waiting = [end for k, end in enumerate(ends) if (node.name, k) in used]
        reached = {end for k, end in enumerate(ends) if (node.name, k) not in used}
        while waiting:
            end = waiting.pop()
            if end in reached:
                continue
            reached.add(end)
            if end[0] in arguments:
                yield node.name
                break
            maker = by_name.get(end[0])
            if maker is not None and maker.op not in ("StopGradient", "PreventGradient"):
                waiting += map(_end, maker.input)


def _end(text: str) -> tuple[str, int]:
    """An operation and the number of its output, as graphs and functions write them."""
    maker, *rest = text.removeprefix("^").split(":")
    return maker, int(rest[-1]) if rest else 0


def _called_with(graph: Any, makers: set[Any], bodies: Any) -> Iterator[tuple[str, str]]:
    """The functions that are called with weights, and the names of the calling operations."""
    seen: set[str] = set()
    for operation in graph.get_operations():
        waiting = list(_functions_of(operation.node_def.attr))
        if not waiting or makers.isdisjoint(_behind_casts(one.op) for one in operation.inputs):
            continue
        while waiting:
            name = waiting.pop()
            if name in seen or name not in bodies:
                continue
            seen.add(name)
            yield name, operation.name
            waiting += [n for node in bodies[name].node_def for n in _functions_of(node.attr)]


def _functions_of(attributes: Any) -> list[str]:
    values = attributes.values()
    every = [one for value in values for one in (value.func, *value.list.func)]
    return [one.name for one in every if one.name]


def _before_identity(tensor: Tensor) -> Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _differentiable_makers(result: Tensor) -> Iterator[Tensor]:
    """A tensor, and those that it has a gradient by."""
    seen, waiting = {id(result)}, [result]
    while waiting:
        tensor = waiting.pop()
        yield tensor
        if tensor.op.type in ("StopGradient", "PreventGradient"):
            continue
        for one in tensor.op.inputs:
            if one.dtype.is_floating and id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)


def _behind_casts(operation: Any) -> Any:
    while operation.type in ("Identity", "Cast"):
        operation = operation.inputs[0].op
    return operation


def ancestors(tensors: Iterable[Tensor]) -> set[Any]:
    """The operations that tensors depend on."""
    reached, waiting = set(), [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in reached:
            reached.add(operation)
            waiting.extend(one.op for one in operation.inputs)
    return reached
