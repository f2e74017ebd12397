"""Traces the template as a function of its state, to be called on every device.

No traced function outlives its call, so whatever a layer's code depends on (`training`, frozen
layers, settings, Python values) has its current value, as on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.attributes import get_attributes, set_attributes
from keras_multigpu.engines.shared import SEED, unique
from keras_multigpu.engines.structures import take_apart
from keras_multigpu.engines.tensorflow.results import (
    Arguments,
    LocalResult,
    split_call,
    tensors_of,
)
from keras_multigpu.engines.tensorflow.tensors import (
    CONSTANT,
    floats,
    for_any_rows,
    is_watched,
    substitute,
)
from keras_multigpu.engines.tensorflow.tracing.functions import (
    has_flow,
    make_function,
    reached_inputs,
    types_without_gradient,
)
from keras_multigpu.engines.tensorflow.tracing.heads import apply_activations, take_off_activations
from keras_multigpu.engines.tensorflow.tracing.inspection import depends_on, find_lost
from keras_multigpu.engines.tensorflow.tracing.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.tracing.segments import Cut
from keras_multigpu.engines.tensorflow.tracing.sync import Exchange, synchronized
from keras_multigpu.engines.tensorflow.tracing.tables import UnsentTables
from keras_multigpu.engines.tensorflow.weights.reading import may_train, source
from keras_multigpu.engines.tensorflow.weights.rows import by_rows_touched
from keras_multigpu.engines.values import Call, Tensor


class Trace:
    """A template's call as a function of its variables' values.

    Args:
        template: the model; layers may be built while it is traced.
        call: its arguments, of which the tensors' types matter.
        layers: the `BatchNormalization` layers that see the whole batch: calls are cut there.
        apart: those that see their slice.
        compiled: compile with XLA.
        order: the highest derivative that a tape may ask for; 0 for none.
        with_penalties: add the regularizers' penalties to the losses.
        for_slices: trace for any number of rows.
        with_tables: leave tables that are spread by rows where they are.

    Attributes:
        variables: the template's variables, each once, in the order of a state.
        assigned: the variables that the call assigns, by key.
        rebuild: makes the template's outputs from their tensors.
        activations: the type of the softmax or sigmoid that ended each output, or `None`.
        tables: those that stay where they are, once it is traced.
        gradient_rules: how to merge gradients that are not plain sums, by the variable's `id`.
        cut: the segments of a call in which replicas exchange values, once it is traced.
    """

    def __init__(
        self,
        template: keras.Model,
        call: Call,
        layers: Sequence[keras.Layer] = (),
        apart: Sequence[keras.Layer] = (),
        compiled: bool = False,
        order: int = 0,
        with_penalties: bool = False,
        for_slices: bool = True,
        with_tables: bool = False,
    ):
        self.template = template
        self.layers = list(layers)
        self.apart = list(apart)
        self.compiled = compiled
        self.order = order
        self.assigned: dict[str, keras.Variable] = {}
        self.rebuild: Callable[[Sequence[Tensor]], Any] = lambda tensors: tensors
        self.activations: list[str | None] = []
        self.gradient_rules: dict[int, str] = {}
        self.cut: Cut | None = None
        self._call = call
        self._exchange: Exchange = _only_traced
        self._graphs: Sequence[Any] = ()
        # Types of operations that have no gradient, before all weights.
        self._constants: set[str] = set()
        self._reached: dict[tuple[bool, ...], list[bool]] = {}
        self._with_penalties = with_penalties
        self._for_slices = for_slices
        self._is_differentiated = order > 0
        # XLA takes no sparse gradients, and rows have no second derivatives.
        self._touches_rows = order == 1 and not compiled
        self.arguments, self._restore = split_call(call)
        self.variables = unique(template.variables)
        self.tables = UnsentTables(self.variables if with_tables else [])
        if order > 1:
            self.tables.send_all("a gradient of a gradient is taken, and sums of rows have none")

    @functools.cached_property
    def forward(self) -> Any:
        """The traced function; of a call that is cut, the first segment's."""
        return self._trace_by_rows() or self._trace_whole()

    def _trace_by_rows(self) -> Any:
        """The traced function, if some tables may stay where they are."""
        compiled = self.compiled
        while self.tables.unsent:
            try:
                forward = self._trace_forward()
            except Exception as error:  # anything: what needs no cut to fail, fails again
                self.tables.send_all(f"the call can't be cut there ({error})")
                break
            functions = [one.function for one in self.cut.segments] if self.cut else [forward]
            unknown = set().union(*(types_without_gradient(one, []) for one in functions))
            if unknown:
                known = ", ".join(sorted(unknown))
                self.tables.send_all(f"the model has operations without a gradient ({known})")
            elif not self.tables.send_read():
                return forward
        self.compiled = compiled
        return None

    def _trace_whole(self) -> Any:
        forward = self._trace_forward()
        if not any(map(is_watched, floats(self.arguments))):
            # A traced function has gradients by all inputs, a tape by those that it watches.
            weights = self.weights_of(forward.inputs)
            self._constants = types_without_gradient(forward, weights)
        return self._trace_forward() if self._constants else forward

    def weights_of(self, state: Sequence[Tensor]) -> list[Tensor]:
        """The values of the variables that tapes watch, of a state, or of the arguments' first."""
        return [one for variable, one in zip(self.variables, state) if may_train(variable)]

    def _trace_forward(self) -> Any:
        apart = not self.compiled and _is_recurrent(self.template)
        forward = self._trace_call(apart)
        if self.compiled and self.cut and self._has_flow(forward, "While", "If", "Case"):
            # The gradient of a segment can't recompute it, as a compiled loop's must.
            self.compiled = False
            forward = self._trace_call(apart)
        # If TensorFlow inlines a call with a loop, it sends the loop's intermediate values to the
        # first device, and back for the gradient. So calls with loops are not inlined.
        if not self.compiled and self._has_flow(forward, "While") != apart:
            forward = self._trace_call(not apart)
        return forward

    def check_gradients(self) -> None:
        """Raises a `ValueError` if the gradients of some weights would be lost."""
        if self._with_penalties:
            self._check_captured()
        if not self.order:
            return
        pairs = zip(self.variables, self.forward.inputs)
        reason = find_lost(self.forward, [one for v, one in pairs if is_watched(source(v))])
        if reason:
            raise ValueError(
                f"A replica can't return the gradients of all its weights. Received: "
                f"{self.template.name!r}, in which {reason}. Give the function its weights as "
                "arguments, or use `mode='data'`, which runs such models on one device."
            )

    def _check_captured(self) -> None:
        """Functions that were traced before have the template's weights, not another replica's."""
        captured = {id(one) for one in self.forward.captured_inputs}
        for variable in self.variables:
            if id(variable._value.handle) in captured:
                raise ValueError(
                    "Independent replicas need separate weights. Received: a function of "
                    f"{self.template.name!r} that was traced before (`tf.function`) with the "
                    f"variable {variable.path!r} of the first replica. Leave `tf.function` out, or "
                    "use `replicas='shared'`."
                )

    def alone(self) -> Trace:
        """A new trace for a single replica, in which no layer sees other replicas."""
        trace = Trace(self.template, self._call)
        trace._is_differentiated = self._is_differentiated
        return trace

    def __call__(
        self, state: list[Tensor], call: Arguments, number: Tensor, size: Tensor
    ) -> LocalResult:
        """Calls the template, uncut, on the device of the current scope."""
        if tf.executing_eagerly():
            return LocalResult(**self._run(state, call, number, size))
        if self.compiled and has_flow(self.forward, "While", "If", "Case"):
            # XLA can't pass intermediate values of loops and branches between clusters, so the
            # gradient's cluster recomputes them.
            return self._recomputed(state, call, number, size)
        return LocalResult(**self.forward(state, call, number, size))

    def activate(self, outputs: Sequence[Tensor]) -> Any:
        """The template's outputs, with the activations that `_run` took off applied again."""
        return self.rebuild(apply_activations(outputs, self.activations))

    def reached(self, is_used: tuple[bool, ...]) -> list[bool]:
        """Whether each argument has a gradient from the results that are used.

        A traced function returns gradients for the arguments that any result depends on.
        """
        if is_used not in self._reached:
            traced = self.forward.structured_outputs
            results = floats((traced["outputs"], traced["attributes"], traced["losses"]))
            used = [result for result, one_is_used in zip(results, is_used) if one_is_used]
            self._reached[is_used] = reached_inputs(self.forward, used)
        return self._reached[is_used]

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the outputs depend on the replica's number, and so on its random numbers.

        An eager call has no graph that tells: whether it drew any.
        """
        if tf.executing_eagerly():
            return any(variable.name == SEED for variable in self.assigned.values())
        traced = self.forward.structured_outputs
        results = tensors_of((traced["outputs"], traced["attributes"]))
        return depends_on(results, self.number)

    @property
    def batch(self) -> list[Tensor]:
        """The call's arguments in the traced graph: they follow the state."""
        count = len(tf.nest.flatten(self.arguments, expand_composites=True))
        return self.forward.inputs[len(self.variables) :][:count]

    @property
    def number(self) -> Tensor:
        """The replica's number in the traced graph: it follows the call's arguments."""
        return self.forward.inputs[len(self.variables) + len(self.batch)]

    def _trace_call(self, apart: bool) -> Any:
        if not (self.layers or self.tables.unsent):
            self.cut, self._graphs = None, ()
            return self._trace(self._run, self.compiled, apart=apart)
        cut = Cut(lambda function: make_function(function, self.compiled, apart))
        self._exchange, self._graphs, self.tables.look_up = cut.exchange, cut.graphs, cut.look_up
        forward = self._trace(lambda *given: cut.run(self._run, given), self.compiled, apart=apart)
        cut.finish(forward)
        self.cut = cut if cut.segments else None
        return forward

    def _has_flow(self, forward: Any, *kinds: str) -> bool:
        functions = [one.function for one in self.cut.segments] if self.cut else [forward]
        return any(has_flow(function, *kinds) for function in functions)

    def _trace(self, function: Any, compiled: bool, more: Any = (), apart: bool = False) -> Any:
        specs = (
            [self.tables.spec_of(variable) for variable in self.variables],
            tf.nest.map_structure(
                for_any_rows if self._for_slices else tf.type_spec_from_value, self.arguments
            ),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
        )
        touching = by_rows_touched() if self._touches_rows else nullcontext()
        # Outside device scopes, so that the function can run on any device.
        with tf.device(None), touching:
            return make_function(function, compiled, apart).get_concrete_function(*specs, *more)

    def _recomputed(self, state: list[Tensor], call: Arguments, *rest: Tensor) -> LocalResult:
        raws: list[LocalResult] = []

        @tf.custom_gradient
        def run(*sources: Tensor) -> Any:
            inner_state, inner_call = substitute((state, call), iter(sources))
            # Hidden from tapes, for which the loop would keep its intermediate values.
            unseen = substitute((state, call), map(tf.stop_gradient, sources))
            raws.append(LocalResult(**self.forward(*unseen, *rest)))

            def backward(*upstream: Tensor) -> Any:
                specs = [tf.TensorSpec(one.shape, one.dtype) for one in upstream]
                function = self._trace(self._gradient, compiled=True, more=(specs,))
                return function(inner_state, inner_call, *rest, list(upstream))

            return floats(raws[0].differentiable), backward

        results = iter(run(*floats((state, call))))
        outputs, attributes, losses = substitute(raws[0].differentiable, results)
        return LocalResult(outputs, attributes, losses, raws[0].updates)

    def _gradient(
        self, state: Any, call: Any, number: Tensor, size: Tensor, upstream: list[Tensor]
    ) -> list[Any]:
        sources = floats((state, call))
        with tf.GradientTape() as tape:
            tape.watch(self.weights_of(state) if self._constants else sources)
            results = self._run(state, call, number, size)
        return tape.gradient(
            floats((results["outputs"], results["attributes"], results["losses"])),
            sources,
            output_gradients=upstream,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    def _run(self, state: list[Tensor], call: Any, number: Tensor, size: Tensor) -> dict[str, Any]:
        tensors = [set_attributes(tensor, own) for tensor, own in zip(*call)]
        args, kwargs = self._restore(tensors)
        pairs = zip(self.variables, state)
        values = [(variable, self.tables.value_of(variable, one)) for variable, one in pairs]
        scope = ReplicaScope(values, number, self._graphs, self._is_differentiated)
        constants = dict.fromkeys(self._constants, CONSTANT)
        overriding = tf.compat.v1.get_default_graph().gradient_override_map(constants)
        exchanging = synchronized(self.layers, size, self._exchange, self.order > 1)
        with exchanging, scope, overriding, self.tables.looked_up_in(scope):
            value = self.template(*args, **kwargs)
            penalties = self._penalties() if self._with_penalties else []
        outputs, self.rebuild = take_apart(value)
        attributes = [get_attributes(output) for output in outputs]
        outputs, self.activations = take_off_activations(outputs)
        self.assigned = {str(key): variable for key, variable in scope.assigned.items()}
        return {
            "outputs": tf.nest.map_structure(tf.identity, outputs, expand_composites=True),
            "attributes": attributes,
            "losses": [*scope.losses, *penalties],
            "updates": {key: scope.new_value(v) for key, v in self.assigned.items()},
        }

    def _penalties(self) -> list[Tensor]:
        regularized = [v for v in self.template.trainable_weights if v.regularizer is not None]
        return [variable.regularizer(variable.value) for variable in regularized]


class NotTracedError(Exception):
    """Replicas that run eagerly, one after the other, can't exchange values."""


def _only_traced(*exchanged: Any) -> Any:
    raise NotTracedError


def _is_recurrent(template: keras.Model) -> bool:
    """Whether to expect a loop; other layers may have loops too."""
    # Keras has no public list of nested layers.
    return any(isinstance(layer, keras.layers.RNN) for layer in template._flatten_layers())
