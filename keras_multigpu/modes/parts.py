"""The parts of a template that its own steps call: data-parallel calls too, while a step runs.

Where whole steps are partitioned, they stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.templates import having_method


class Parts:
    """The layers and sub-models of a data-parallel model's template.

    A `train_step` may call `self.encoder(x)`, and never `self(x)`. While it runs, every layer has
    other methods: its `call` spreads the batch, as `self(x)` does. Only what the step itself calls
    is spread, not what layers call in turn, nor what other threads call.
    """

    def __init__(self, model: Any, runner: engines.DataRunner):
        self._model = model
        self._runner = runner
        # By the layer's `id`; the layer is kept, so that no other one gets its `id`.
        self._known: dict[int, tuple[keras.Layer, engines.DataRunner | None]] = {}
        self._warned: set[str] = set()
        self._thread: int | None = None  # the thread that runs a step
        self._is_at_rest = False

    def retrace(self) -> None:
        """Drops everything that was traced or planned: the layers may have changed."""
        self._known.clear()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Scope in which this thread's calls of layers are data-parallel."""
        template = self._model.template
        if self._thread is not None or not engines.own_steps(template):
            yield
            return
        self._thread = threading.get_ident()
        try:
            with contextlib.ExitStack() as replaced:
                for layer in engines.all_layers(template):
                    for name, run in self._methods(layer).items():
                        replaced.enter_context(self._replaced(layer, name, run))
                yield
        finally:
            self._thread = None

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Scope, in a step, in which layers run their own methods, as inside a replica."""
        if threading.get_ident() != self._thread:
            yield
            return
        with unchanged(self, "_is_at_rest", True):
            yield

    def _methods(self, layer: keras.Layer) -> dict[str, Callable[..., Any]]:
        """What runs in place of a layer's methods; called with the layer and its own method."""
        if layer is self._model.template:
            return {"call": lambda layer, own, args, kwargs: own(*args, **kwargs)}
        methods = {"call": self._call, "stateless_call": self._stateless_call}
        return methods if layer.built else {**methods, "build": _build}

    def _replaced(
        self, layer: keras.Layer, name: str, run: Callable[..., Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Scope in which `run` replaces a layer's method for calls that the step makes itself."""
        own = getattr(layer, name)

        @functools.wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            if self._is_at_rest or threading.get_ident() != self._thread:
                return own(*args, **kwargs)
            with self.at_rest():
                return run(layer, own, args, kwargs)

        return having_method(layer, name, method)

    def _call(self, layer: keras.Layer, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not layer.built:  # Keras builds it by this call
            return own(*args, **kwargs)
        is_first, runner = id(layer) not in self._known, self._runner_of(layer)
        if runner is None:
            return own(*args, **kwargs)
        if "training" not in kwargs and (training := engines.is_training()) is not None:
            # Keras takes it from the call around, which is over after the first replica.
            kwargs = {**kwargs, "training": training}
        if is_first and not all(one.built for one in engines.all_layers(layer)):
            engines.current().build(layer, (args, kwargs), [layer])
            layer._clear_losses()  # of this trial
        # Keras applies the regularizer afterwards, to the outputs of the whole batch.
        with unchanged(layer, "activity_regularizer", None):
            return runner.run((args, kwargs)).outputs

    def _stateless_call(
        self, layer: keras.Layer, own: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        runner = self._runner_of(layer)
        return runner.stateless_call(own, args, kwargs) if runner else own(*args, **kwargs)

    def _runner_of(self, layer: keras.Layer) -> engines.DataRunner | None:
        """What runs a layer; `None` if it runs as it is."""
        if id(layer) not in self._known:
            runner = self._runner.for_part(layer)
            if runner is not None and _is_called_otherwise(layer):
                self._warn_of_own_call(layer)  # a replica would apply it again
                runner = None
            self._known[id(layer)] = layer, runner
        return self._known[id(layer)][1]

    def _warn_of_own_call(self, layer: keras.Layer) -> None:
        """Warns once of a class that overrides `__call__`."""
        text = (
            f"{layer.name!r}, which a step of {self._model.name!r} calls, is not spread over the "
            f"devices, because {type(layer).__name__} overrides `__call__`. The numbers are those "
            "of one device. Override `call` instead."
        )
        if len(self._model.devices) > 1 and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


def _is_called_otherwise(layer: keras.Layer) -> bool:
    """Whether the `__call__` of a layer's class is not Keras's."""
    definer = next(cls for cls in type(layer).__mro__ if "__call__" in vars(cls))
    return not definer.__module__.startswith("keras.")


def _build(layer: keras.Layer, own: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Builds a layer outside the step, in which its variables would have no values yet."""
    engines.current().in_fresh_thread(functools.partial(own, *args, **kwargs))
