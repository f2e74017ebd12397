"""The template as a function of its state: traced once, called on every device."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import get_mask, set_mask
from keras_multigpu.engines.tensorflow.fused import fused, fusible
from keras_multigpu.engines.tensorflow.raw import Raw
from keras_multigpu.engines.tensorflow.rows import by_rows_touched
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.sync import Replica, synchronized
from keras_multigpu.engines.tensorflow.tensors import floats, for_any_rows, map_tensors, substitute
from keras_multigpu.engines.values import Tensor

_for_xla = contextvars.ContextVar("_for_xla", default=False)


@contextlib.contextmanager
def traced_for_xla() -> Iterator[None]:
    """A scope in which templates are traced as XLA would be given them, whoever runs them."""
    token = _for_xla.set(True)
    try:
        yield
    finally:
        _for_xla.reset(token)


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
        self._functions: dict[tuple[str, bool, bool], Any] = {}
        self._loops: dict[Any, bool] = {}  # whether traced functions have some

    @property
    def variables(self) -> list[keras.Variable]:
        """The template's variables, each once: the order of a state."""
        return list({id(variable): variable for variable in self.template.variables}.values())

    def __call__(
        self, state: list[Tensor], call: Any, replica: Replica, compiled: bool, once: bool
    ) -> Raw:
        """Calls the template on the device of the current scope.

        Args:
            state: the value of each variable.
            call: the arguments `(args, kwargs)`, and the mask of each tensor in them.
            replica: which replica this is.
            compiled: compile it with XLA.
            once: first derivatives will be asked for, and no second ones.
        """
        number, size = tf.constant(replica.number), tf.cast(replica.size, tf.float32)
        if tf.executing_eagerly():
            results = self._run(state, call, number, size, replica.count, ())
            return Raw(**results, shapes=_shapes(results["outputs"], (None,)))
        # A part of the key of the trace: a layer may behave otherwise when frozen.
        flags = tuple(variable.trainable for variable in self.variables)
        # And for collective operations the call's own number: no two calls in a step may mix.
        static = (replica.count, (replica.serial, *flags))
        fast = once and not (compiled or _for_xla.get())
        arguments = (self._run, state, call, static, compiled, fast)
        can_be_apart = not compiled and not self.layers
        name = "apart" if can_be_apart and _is_recurrent(self.template) else "inlined"
        forward = self._concrete(name, *arguments)
        if forward not in self._loops:
            self._loops[forward] = _has_loop(forward)
        if self._loops[forward] and compiled:
            # XLA can't hand a loop's intermediate values from one cluster to another, so the
            # gradient's cluster runs the loop once more.
            return self._recomputed(forward, state, call, (number, size, *static))
        # Where TensorFlow makes a call a part of the calling graph, it has the intermediate
        # values of loops go to the first device, and come back for the gradient. (Replicas
        # that exchange statistics would wait for each other for ever in calls apart.)
        better = "apart" if can_be_apart and self._loops[forward] else "inlined"
        if better != name:
            forward = self._concrete(better, *arguments)
        return self._raw(forward, state, call, number, size, *static)

    def _raw(self, forward: Any, *arguments: Any) -> Raw:
        shapes = _shapes(forward.structured_outputs["outputs"])
        return Raw(**forward(*arguments), shapes=shapes, trace=(forward, _tensors(arguments)))

    def _concrete(
        self,
        name: str,
        function: Any,
        state: Any,
        call: Any,
        static: Any,
        compiled: bool = False,
        fast: bool = False,
    ) -> Any:
        """The function traced.

        Args:
            name: by which to keep it.
            function: the function.
            state: what it takes first: tensors, whose types count.
            call: and second.
            static: its other arguments.
            compiled: have XLA compile it.
            fast: by operations that XLA can't compile, or whose second derivative is another.
        """
        key = name, compiled, fast
        if key not in self._functions:
            self._functions[key] = tf.function(
                function,
                autograph=False,
                jit_compile=compiled or None,
                experimental_attributes={"_noinline": True} if name == "apart" else None,
            )
        specs = [
            [tf.TensorSpec(value.shape, value.dtype) for value in state],
            tf.nest.map_structure(for_any_rows, call),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]
        with tf.device(None), self._made_fast() if fast else contextlib.nullcontext():
            return self._functions[key].get_concrete_function(*specs, *static)

    @contextlib.contextmanager
    def _made_fast(self) -> Iterator[None]:
        alone = [layer for layer in fusible(self.template) if layer not in self.layers]
        with fused(alone, tapes=0), by_rows_touched():
            yield

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
                    "backward", self._gradient, state, call_and_upstream, rest[2:], compiled=True
                )
                return function(inner_state, call_and_upstream, *rest)

            return floats(raws[0].differentiable), backward

        results = iter(run(*floats((state, call))))
        outputs, losses = substitute(raws[0].differentiable, results)
        trace = (forward, _tensors((state, call)))
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


def _is_recurrent(template: keras.Model) -> bool:
    """Whether loops are to be expected; there are other layers that have some."""
    return any(isinstance(layer, keras.layers.RNN) for layer in template._flatten_layers())


def _has_loop(function: Any) -> bool:
    graph = function.graph.as_graph_def()
    bodies = [body.node_def for body in graph.library.function]
    return any("While" in node.op for node in itertools.chain(graph.node, *bodies))
