"""The template as a function of its state: traced once, called on every device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import get_mask, set_mask
from keras_multigpu.engines.tensorflow.fused import fused, fusible
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.sync import Replica, synchronized
from keras_multigpu.engines.tensorflow.tensors import floats, for_any_rows, map_tensors, substitute
from keras_multigpu.engines.values import Tensor


@dataclasses.dataclass
class Raw:
    """What a replica returns, on its own device.

    Attributes:
        outputs: the template's outputs.
        masks: the mask of each output, `None` where it has none.
        losses: the tensors given to `add_loss`.
        updates: the new values of the variables assigned, by their keys.
        shapes: the outputs' shapes for any number of rows.
        trace: the traced function and the tensors it was called with; `None` eagerly.
    """

    outputs: Any
    masks: list[Tensor | None]
    losses: list[Tensor]
    updates: dict[str, Tensor]
    shapes: list[tuple[int | None, ...]]
    trace: tuple[Any, list[Tensor]] | None = None

    @property
    def differentiable(self) -> Any:
        """What gradients can come back to."""
        return self.outputs, self.losses

    def connected(self, sources: list[Tensor], is_used: list[bool]) -> list[bool]:
        """Whether each source has a part in the results that are used.

        A traced function has a gradient for all of its arguments; this tells those that would
        have none if the template were called by itself.
        """
        if self.trace is None or all(is_used):
            return [True] * len(sources)
        function, arguments = self.trace
        traced = function.structured_outputs
        results = floats((traced["outputs"], traced["losses"]))
        reached = _reached_from([one for one, use in zip(results, is_used) if use])
        # Not a comparison of tensors, which would be one of their values.
        places = {id(argument): place for place, argument in enumerate(arguments)}
        return [function.inputs[places[id(source)]].op in reached for source in sources]


class TemplateFunction:
    """The call of a template with its variables' values as arguments.

    Args:
        template: a built model.
        layers: its `BatchNormalization` layers that see the whole batch.
        with_penalties: count the penalties of the weights' regularizers among the losses.
    """

    def __init__(self, template: keras.Model, layers: list[keras.Layer], with_penalties: bool):
        self.template = template
        self.layers = layers
        self.with_penalties = with_penalties
        self.assigned: dict[str, keras.Variable] = {}
        self._functions: dict[str, Any] = {}

    @property
    def variables(self) -> list[keras.Variable]:
        """The template's variables, each once: the order of a state."""
        return list({id(variable): variable for variable in self.template.variables}.values())

    def __call__(self, state: list[Tensor], call: Any, replica: Replica, compiled: bool) -> Raw:
        """Calls the template on the device of the current scope.

        Args:
            state: the value of each variable.
            call: the arguments `(args, kwargs)`, and the mask of each tensor in them.
            replica: which replica this is.
            compiled: compile it with XLA.
        """
        number, size = tf.constant(replica.number), tf.cast(replica.size, tf.float32)
        if tf.executing_eagerly():
            results = self._run(state, call, number, size, replica.count, ())
            return Raw(**results, shapes=_shapes(results["outputs"], (None,)))
        # A part of the key of the trace: a layer may behave otherwise when frozen.
        flags = tuple(variable.trainable for variable in self.variables)
        # And for collective operations the call's own number: no two calls in a step may mix.
        static = (replica.count, (replica.serial, *flags))
        forward = self._concrete("forward", self._run, compiled, state, call, static)
        if compiled and _has_loop(forward):
            # XLA can't hand a loop's intermediate values from one cluster to another, so the
            # gradient's cluster runs the loop once more.
            return self._recomputed(forward, state, call, (number, size, *static))
        if _has_loop(forward) and not self.layers:
            # Where TensorFlow makes a call a part of the calling graph, it has the intermediate
            # values of loops go to the first device, and come back for the gradient. (Replicas
            # that exchange statistics would wait for each other for ever in calls apart.)
            forward = self._concrete("forward, apart", self._run, False, state, call, static)
        return self._raw(forward, state, call, number, size, *static)

    def _raw(self, forward: Any, *arguments: Any) -> Raw:
        shapes = _shapes(forward.structured_outputs["outputs"])
        return Raw(**forward(*arguments), shapes=shapes, trace=(forward, _tensors(arguments)))

    def _concrete(
        self, name: str, function: Any, compiled: bool, state: Any, call: Any, static: Any
    ) -> Any:
        key = f"{name}, compiled" if compiled else name
        if key not in self._functions:
            self._functions[key] = tf.function(
                function,
                autograph=False,
                jit_compile=compiled or None,
                experimental_attributes={"_noinline": True} if name.endswith("apart") else None,
            )
        specs = [
            [tf.TensorSpec(value.shape, value.dtype) for value in state],
            tf.nest.map_structure(for_any_rows, call),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]
        alone = [layer for layer in fusible(self.template) if layer not in self.layers]
        with tf.device(None), fused([] if compiled else alone):
            return self._functions[key].get_concrete_function(*specs, *static)

    def _recomputed(self, forward: Any, state: list[Tensor], call: Any, rest: Any) -> Raw:
        raws: list[Raw] = []

        @tf.custom_gradient
        def run(*sources: Tensor) -> Any:
            inner_state, inner_call = substitute((state, call), iter(sources))
            # Unseen by any tape, which would have the loop keep its intermediate values.
            unseen = substitute((state, call), map(tf.stop_gradient, sources))
            raws.append(self._raw(forward, *unseen, *rest))

            def backward(*upstream: Tensor) -> Any:
                call_and_upstream = (inner_call, list(upstream))
                function = self._concrete(
                    "backward", self._gradient, True, state, call_and_upstream, rest[2:]
                )
                return function(inner_state, call_and_upstream, *rest)

            return floats(raws[0].differentiable), backward

        results = iter(run(*floats((state, call))))
        outputs, losses = substitute(raws[0].differentiable, results)
        trace = (
            forward,
            [
                part
                for part in tf.nest.flatten((state, call), expand_composites=True)
                if tf.is_tensor(part)
            ],
        )
        return dataclasses.replace(raws[0], outputs=outputs, losses=losses, trace=trace)

    def _gradient(self, state: Any, call_and_upstream: Any, *rest: Any) -> list[Any]:
        call, upstream = call_and_upstream
        sources = floats((state, call))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = self._run(state, call, *rest)
        return tape.gradient(
            floats((results["outputs"], results["losses"])),
            sources,
            output_gradients=upstream,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    def _run(
        self,
        state: list[Tensor],
        call: Any,
        number: Tensor,
        size: Tensor,
        count: int,
        flags: tuple[Any, ...],
    ) -> dict[str, Any]:
        inputs, masks = call
        for part, mask in zip(tf.nest.flatten(inputs), masks):
            set_mask(part, mask)
        args, kwargs = inputs
        scope = ReplicaScope(zip(self.variables, state), number)
        with synchronized(self.layers, Replica(number, size, count)), scope:
            outputs = self.template(*args, **kwargs)
            penalties = self._penalties() if self.with_penalties else []
        updates = {}
        for variable in scope.assigned.values():
            key = str(id(variable))
            self.assigned[key] = variable
            updates[key] = scope.get_current_value(variable)
        return {
            "outputs": map_tensors(tf.identity, outputs),
            "masks": [get_mask(part) for part in tf.nest.flatten(outputs)],
            "losses": [*scope.losses, *penalties],
            "updates": updates,
        }

    def _penalties(self) -> list[Tensor]:
        regularized = [v for v in self.template.trainable_weights if v.regularizer is not None]
        return [variable.regularizer(variable.value) for variable in regularized]


def _shapes(outputs: Any, first: tuple[None, ...] = ()) -> list[tuple[int | None, ...]]:
    """The shapes of outputs, with the first axis replaced where it is known for one call only."""
    flat = [part for part in tf.nest.flatten(outputs) if part is not None]
    shapes = [part.shape.as_list() if part.shape.rank is not None else [None] for part in flat]
    return [(*first[: len(shape)], *shape[len(first) :]) for shape in shapes]


def _tensors(structure: Any) -> list[Tensor]:
    return [
        part for part in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(part)
    ]


def _reached_from(tensors: list[Tensor]) -> set[Any]:
    """The operations of a graph that some of its tensors depend on."""
    reached: set[Any] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in reached:
            reached.add(operation)
            waiting.extend(tensor.op for tensor in operation.inputs)
    return reached


def _has_loop(function: Any) -> bool:
    graph = function.graph.as_graph_def()
    bodies = [body.node_def for body in graph.library.function]
    return any("While" in node.op for node in itertools.chain(graph.node, *bodies))
