"""Cuts a traced call into segments wherever the replicas exchange values.

A segment is a function, called on every device before the next one is called on any. Between
two, the replicas' values are merged by ordinary operations. The template runs once: at an exchange
a new function's graph becomes the default, and captures what it needs of the graphs before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.results import tensors_of
from keras_multigpu.engines.tensorflow.tensors import floats, gradient_order, is_float, message_of
from keras_multigpu.engines.tensorflow.tracing.functions import reached_inputs
from keras_multigpu.engines.tensorflow.tracing.scope import HiddenStateError
from keras_multigpu.engines.tensorflow.tracing.sync import Merge
from keras_multigpu.engines.values import Tensor


@dataclasses.dataclass(frozen=True)
class RowsOf:
    """What a boundary is for: sums of rows of a table, computed in a type."""

    table: keras.Variable
    dtype: str


@dataclasses.dataclass
class Boundary:
    """Where one segment ends and the next begins.

    Attributes:
        local: what a replica hands over: one tensor, or the indices and weights of a lookup.
        what: what is done with it: merges those of all replicas, or looks up.
        merged: the tensor that a replica goes on with.
    """

    local: list[Tensor]
    what: Merge | RowsOf
    merged: Tensor


@dataclasses.dataclass
class Segment:
    """One function of a call that is cut. Its tensors are those of the traced graphs.

    Attributes:
        function: the traced function.
        takes: what it needs: the call's arguments, or what the boundary before it merged and
            tensors of earlier segments. Tensors of other graphs are passed as they are.
        gives: what it returns.
        results: those of `gives` that may get gradients.
    """

    function: Any
    takes: list[Tensor]
    gives: list[Tensor]
    results: list[Tensor]
    _reached: dict[tuple[bool, ...], dict[int, bool]] = dataclasses.field(default_factory=dict)

    def __call__(self, merged: Tensor, *captured: Tensor) -> list[Tensor]:
        """Calls a segment that is not the first."""
        self.function.set_external_captures(list(captured))
        return self.function(merged)

    def reached(self, is_used: tuple[bool, ...]) -> dict[int, bool]:
        """Whether each of `takes`, by `id`, has a gradient from the results that are used."""
        if is_used not in self._reached:
            used = [result for result, one_is_used in zip(self.results, is_used) if one_is_used]
            inputs = reached_inputs(self.function, used)
            self._reached[is_used] = dict(zip(map(id, self.takes), inputs))
        return self._reached[is_used]


class Cut:
    """The segments of one traced call.

    Args:
        make: makes a `tf.function` of a Python function.

    Attributes:
        segments: the segments; none before `finish`, and if there is no exchange.
        boundaries: the exchanges between them.
        graphs: the graphs of the segments.
        results: what the call returns, as tensors of the segments' graphs.
    """

    def __init__(self, make: Callable[[Any], Any]):
        self.segments: list[Segment] = []
        self.boundaries: list[Boundary] = []
        self.results: Any = None
        self._make = make
        self._later: list[_OpenFunction] = []
        self.graphs: list[Any] = []
        self._gives: list[dict[int, Tensor]] = []
        self._entered = contextlib.ExitStack()

    def look_up(
        self, table: keras.Variable, indices: Tensor, weights: Tensor | None, dtype: str
    ) -> Tensor | None:
        """Ends a segment with the indices; returns the sums. `None` where it can't end."""
        given = [] if weights is None else [weights]
        if tf.compat.v1.get_default_graph() is not self.graphs[-1] or gradient_order(given):
            return None
        spec = tf.TensorSpec([indices.shape[0], table.shape[1]], dtype)
        return self._end(
            [tf.identity(one) for one in (indices, *given)], RowsOf(table, dtype), spec
        )

    def exchange(self, local: Tensor, merge: Merge, spec: tf.TensorSpec) -> Tensor:
        """Ends a segment with the tensor that it hands over; returns what the replicas made."""
        if tf.compat.v1.get_default_graph() is not self.graphs[-1]:
            raise HiddenStateError(
                "a `BatchNormalization` is called within a loop, a branch or a `tf.function` of "
                "the model, where replicas can't exchange statistics"
            )
        if gradient_order([local]):
            raise HiddenStateError(
                "a tape within the model differentiates a `BatchNormalization` in training, whose "
                "statistics come from all replicas"
            )
        return self._end([local], merge, spec)

    def _end(self, local: list[Tensor], what: Merge | RowsOf, spec: tf.TensorSpec) -> Tensor:
        later = _OpenFunction(self._make, spec)
        self._later.append(later)
        self._entered.enter_context(later.graph.as_default())
        self.graphs.append(later.graph)
        self.boundaries.append(Boundary(local, what, later.argument))
        return later.argument

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The body of the first segment: runs the whole function.

        Returns what the segment gives; if there was no exchange, what the function returns.
        """
        self.graphs.append(tf.compat.v1.get_default_graph())
        try:
            results = function(*arguments)
            if not self._later:
                return results
            self.results = tf.nest.map_structure(self._inside, results, expand_composites=True)
            self._entered.close()
            self._gives = self._find_gives(set(map(id, tensors_of(arguments))))
            for later, gives in zip(self._later, self._gives[1:]):
                later.close(list(gives.values()))
        except Exception as error:
            if self._later and not isinstance(error, HiddenStateError):
                problem = f"it can't be cut at a `BatchNormalization` ({message_of(error)})"
                raise HiddenStateError(problem) from error
            raise
        finally:
            self._entered.close()
            for later in self._later:
                later.drop()
        return list(self._gives[0].values())

    def finish(self, first: Any) -> None:
        """Makes the segments; `first` is the function of the first."""
        if not self._later:
            return
        self._check_gradients()
        count = len(first.inputs) - len(first.captured_inputs)
        functions, takes = [first], [list(first.inputs[:count])]
        may_get = {*map(id, floats(self.differentiable))}
        for later, boundary in zip(self._later, self.boundaries):
            functions.append(later.function)
            takes.append([boundary.merged, *later.function.captured_inputs])
            may_get |= {*map(id, boundary.local), *map(id, later.function.captured_inputs)}
        for function, needs, own in zip(functions, takes, self._gives):
            gives = list(own.values())
            results = [one for one in gives if is_float(one) and id(one) in may_get]
            self.segments.append(Segment(function, needs, gives, results))

    @property
    def differentiable(self) -> Any:
        """The results that can get gradients."""
        return [self.results[key] for key in ("outputs", "attributes", "losses")]

    def _check_gradients(self) -> None:
        """Custom gradients are Python functions, which refer to tensors by their own graph."""
        for graph in self.graphs[1:]:
            crossed = {id(own) for outer, own in graph.captures if self._place(outer) is not None}
            for operation in graph.get_operations():
                if operation.type != "IdentityN" or crossed.isdisjoint(map(id, operation.inputs)):
                    continue
                if "_gradient_op_type" in operation.node_def.attr:
                    raise HiddenStateError(
                        f"{operation.name!r} has a custom gradient and uses a tensor from before "
                        "the place where the call is cut, which it does not follow"
                    )

    def _inside(self, result: Any) -> Tensor:
        return result if self._place(result) is not None else tf.identity(result)

    def _place(self, tensor: Any) -> int | None:
        """The segment whose graph a tensor is of."""
        graph = None if hasattr(tensor, "numpy") else getattr(tensor, "graph", None)
        return next((place for place, own in enumerate(self.graphs) if own is graph), None)

    def _find_gives(self, arguments: set[int]) -> list[dict[int, Tensor]]:
        """What each segment must return: for exchanges, for later segments, and as results."""
        crossing = [outer for graph in self.graphs[1:] for outer in graph.external_captures]
        crossing = [outer for outer in crossing if id(outer) not in arguments]
        local = [one for boundary in self.boundaries for one in boundary.local]
        gives: list[dict[int, Tensor]] = [{} for _ in self.graphs]
        for tensor in [*local, *crossing, *tensors_of(self.results)]:
            place = self._place(tensor)
            if place is None:
                continue
            if tensor.dtype in (tf.variant, tf.resource):
                raise HiddenStateError(
                    f"{tensor.op.name!r} keeps a TensorFlow state from before a "
                    "`BatchNormalization` until after it, which replicas can't pass on"
                )
            gives[place][id(tensor)] = tensor
        return gives


class _OpenFunction:
    """A function of one argument whose graph stays open for other code to fill.

    TensorFlow makes functions of Python functions only, so one waits in a thread of its own,
    within its graph, for what it is to return.

    Attributes:
        graph: the graph.
        argument: the argument, as a tensor of the graph.
        function: the finished function; after `close`.
    """

    def __init__(self, make: Callable[[Any], Any], spec: tf.TensorSpec):
        self.function: Any = None
        self._opened: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._trace, args=(make, spec), daemon=True)
        self._thread.start()
        opened = self._opened.get()
        if opened is None:
            self._finish()
        self.graph, self.argument = opened

    def close(self, results: list[Tensor]) -> None:
        """Makes the function return tensors of its graph."""
        self._returned.put(results)
        self._finish()

    def drop(self) -> None:
        """Ends the thread, if the function is not finished."""
        if self._thread.is_alive():
            self._returned.put(None)
            self._thread.join()

    def _finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _trace(self, make: Callable[[Any], Any], spec: tf.TensorSpec) -> None:
        try:
            self.function = make(self._body).get_concrete_function(spec)
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        finally:
            self._opened.put(None)

    def _body(self, argument: Tensor) -> list[Tensor]:
        self._opened.put((tf.compat.v1.get_default_graph(), argument))
        results = self._returned.get()
        if results is None:
            raise RuntimeError("The call that this function is a segment of could not be traced.")
        return results
