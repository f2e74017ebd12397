"""Traces the template as a function of its state, to be called on every device.

No traced function outlives its call, so whatever a layer's code depends on (`training`, frozen
layers, settings, Python values) has its current value, as on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from keras_multigpu.engines.tensorflow.weights.reading import may_train, source
from keras_multigpu.engines.values import Call, Tensor


class Trace:
    """A template's call as a function of its variables' values.

    Args:
        template: the model; layers may be built while it is traced.
        call: its arguments, of which the tensors' types matter.
        compiled: compile with XLA.
        order: the highest derivative that a tape may ask for; 0 for none.
        with_penalties: add the regularizers' penalties to the losses.

    Attributes:
        variables: the template's variables, each once, in the order of a state.
        assigned: the variables that the call assigns, by key.
        rebuild: makes the template's outputs from their tensors.
        activations: the type of the softmax or sigmoid that ended each output, or `None`.
    """

    def __init__(
        self,
        template: keras.Model,
        call: Call,
        compiled: bool = False,
        order: int = 0,
        with_penalties: bool = False,
    ):
        self.template = template
        self.compiled = compiled
        self.order = order
        self.assigned: dict[str, keras.Variable] = {}
        self.rebuild: Callable[[Sequence[Tensor]], Any] = lambda tensors: tensors
        self.activations: list[str | None] = []
        self._call = call
        # Types of operations that have no gradient, before all weights.
        self._constants: set[str] = set()
        self._reached: dict[tuple[bool, ...], list[bool]] = {}
        self._with_penalties = with_penalties
        self._is_differentiated = order > 0
        self.arguments, self._restore = split_call(call)
        self.variables = unique(template.variables)

    @functools.cached_property
    def forward(self) -> Any:
        """The traced function."""
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
        forward = self._trace(self._run, self.compiled, apart=apart)
        # If TensorFlow inlines a call with a loop, it sends the loop's intermediate values to the
        # first device, and back for the gradient. So calls with loops are not inlined.
        if not self.compiled and has_flow(forward, "While") != apart:
            forward = self._trace(self._run, self.compiled, apart=not apart)
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

    def __call__(self, state: list[Tensor], call: Arguments, number: Tensor) -> LocalResult:
        """Calls the template on the device of the current scope."""
        if tf.executing_eagerly():
            return LocalResult(**self._run(state, call, number))
        if self.compiled and has_flow(self.forward, "While", "If", "Case"):
            # XLA can't pass intermediate values of loops and branches between clusters, so the
            # gradient's cluster recomputes them.
            return self._recomputed(state, call, number)
        return LocalResult(**self.forward(state, call, number))

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

    def _trace(self, function: Any, compiled: bool, more: Any = (), apart: bool = False) -> Any:
        specs = (
            [tf.TensorSpec(one.shape, one._value.dtype) for one in self.variables],
            tf.nest.map_structure(tf.type_spec_from_value, self.arguments),
            tf.TensorSpec([], tf.int32),
        )
        # Outside device scopes, so that the function can run on any device.
        with tf.device(None):
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

    def _gradient(self, state: Any, call: Any, number: Tensor, upstream: list[Tensor]) -> list[Any]:
        sources = floats((state, call))
        with tf.GradientTape() as tape:
            tape.watch(self.weights_of(state) if self._constants else sources)
            results = self._run(state, call, number)
        return tape.gradient(
            floats((results["outputs"], results["attributes"], results["losses"])),
            sources,
            output_gradients=upstream,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    def _run(self, state: list[Tensor], call: Any, number: Tensor) -> dict[str, Any]:
        tensors = [set_attributes(tensor, own) for tensor, own in zip(*call)]
        args, kwargs = self._restore(tensors)
        values = list(zip(self.variables, state))
        scope = ReplicaScope(values, number, (), self._is_differentiated)
        constants = dict.fromkeys(self._constants, CONSTANT)
        overriding = tf.compat.v1.get_default_graph().gradient_override_map(constants)
        with scope, overriding:
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


def _is_recurrent(template: keras.Model) -> bool:
    """Whether to expect a loop; other layers may have loops too."""
    # Keras has no public list of nested layers.
    return any(isinstance(layer, keras.layers.RNN) for layer in template._flatten_layers())
