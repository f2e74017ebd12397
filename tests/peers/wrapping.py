"""Runs the training methods of plain Keras models on parallel models of them, unseen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu import make_parallel
from keras_multigpu.modes import DataParallel, ParallelModel
from keras_multigpu.modes.one_model import PER_COMPILED, own

METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "save_weights",
    "load_weights",
)


class Wrapping:
    """Parallel models of the plain ones that one test trains.

    Args:
        devices: how many each parallel model uses.
        with_calls: run `model(x)` in parallel too, where `x` is of numbers.
        with_save: let the parallel model write whole-model files too.

    Attributes:
        calls: how often a plain model's method was run by a parallel model, by the method.
        slicings: how often a parallel model has called its replicas, in a graph or eagerly.
    """

    def __init__(self, devices: int, with_calls: bool = True, with_save: bool = False):
        self.devices = devices
        self.methods = METHODS + ("__call__",) * with_calls + ("save",) * with_save
        self.calls: dict[str, int] = {}
        self.slicings = 0
        self._parallel: dict[int, tuple[keras.Model, ParallelModel | Exception]] = {}
        self._busy = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Intercepts the methods of `keras.Model` for as long as it is open."""
        with contextlib.ExitStack() as stack:
            for name in self.methods:
                stack.enter_context(_replaced(_definer(name), name, self._redirect))
            # Keras asks whether a class has the `compile` of its trainer.
            stack.enter_context(_replaced(_definer("compile"), "compile", self._compile))
            stack.enter_context(_replaced(DataParallel, "_parallel_call_replicas", self._count))
            yield

    def _is_plain(self, model: Any) -> bool:
        return not self._busy and not isinstance(model, ParallelModel)

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles the parallel model, as its user would, and tells the plain one of it."""

        @functools.wraps(original)
        def compile_parallel(model: Any, *args: Any, **kwargs: Any) -> None:
            parallel = self._parallel_of(model) if self._is_plain(model) else None
            if not isinstance(parallel, ParallelModel):
                original(model, *args, **kwargs)
                return
            _share(model, parallel)
            original(parallel, *args, **kwargs)
            _share(parallel, model)

        return compile_parallel

    def _redirect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def redirected(model: Any, *args: Any, **kwargs: Any) -> Any:
            is_call = original.__name__ == "__call__"
            if not self._is_plain(model) or (is_call and not _has_values((args, kwargs))):
                return original(model, *args, **kwargs)
            parallel = self._parallel_of(model)
            if isinstance(parallel, Exception):
                raise parallel
            # A method of the class's own has begun on the plain model, and is not begun again.
            overridden = getattr(type(model), original.__name__) is not redirected
            method = functools.partial(original, parallel)
            if not overridden:
                method = getattr(parallel, original.__name__)
            return self._run(method, model, parallel, args, kwargs)

        return redirected

    def _count(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(parallel: Any, *args: Any, **kwargs: Any) -> Any:
            self.slicings += 1
            return original(parallel, *args, **kwargs)

        return counted

    def _parallel_of(self, model: Any) -> ParallelModel | Exception:
        if id(model) not in self._parallel:
            try:
                parallel = make_parallel(model, self.devices)
            except Exception as error:  # raised when the test comes to train the model
                parallel = error
            self._parallel[id(model)] = model, parallel
        return self._parallel[id(model)][1]

    def _run(self, method: Any, model: Any, parallel: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(method, "func", method).__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        _share(model, parallel)
        self._busy = True
        try:
            return method(*args, **kwargs)
        finally:
            self._busy = False
            _share(parallel, model)


def model_trainer(trainer: type) -> type[keras.Model]:
    """A base that makes a model of a class mixed from Keras's own trainer and a layer.

    Keras's tests have such classes, and only models can be made parallel.
    """

    class ModelTrainer(keras.Model):
        layers: Any = ()  # an attribute as any other, as it is for a layer

        def __init__(self) -> None:
            trainer.__init__(self)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            for base in cls.__mro__:
                if issubclass(base, keras.Layer) and not issubclass(keras.Model, base):
                    _define_again(cls, base)

    return ModelTrainer


@contextlib.contextmanager
def any_batch_size() -> Iterator[None]:
    """Leaves out the batch sizes that a test builds into its models' inputs."""

    def free(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(self: Any, shape: Any = None, **kwargs: Any) -> None:
            kwargs.pop("batch_size", None)
            if kwargs.get("batch_shape") is not None:
                kwargs["batch_shape"] = (None, *kwargs["batch_shape"][1:])
            original(self, shape, **kwargs)

        return init

    with _replaced(keras.layers.InputLayer, "__init__", free):
        yield


def _define_again(cls: type, base: type) -> None:
    """Lets what a layer's class defines come before what `keras.Model` defines."""
    if issubclass(base, keras.Model):
        return
    for name in vars(keras.Model).keys() & vars(base).keys():
        if not name.startswith("__") and name not in vars(cls):
            setattr(cls, name, vars(base)[name])


def _definer(name: str) -> type:
    """The class by which `keras.Model` has a method; layers are called as they are."""
    if name == "__call__":
        return keras.Model
    return next(cls for cls in keras.Model.__mro__ if name in vars(cls))


def _share(source: Any, target: Any) -> None:
    """Gives a model what `compile` and the training methods left on the other one."""
    values, others = _compiled(source), _compiled(target)
    for name in PER_COMPILED:
        if name in values:
            others[name] = values[name]
        else:
            others.pop(name, None)


def _compiled(model: Any) -> dict[str, Any]:
    """The values that a plain model and its parallel model don't have in common."""
    return own(model).keras if isinstance(model, ParallelModel) else vars(model)


def _has_values(arguments: Any) -> bool:
    """Whether a call has numbers to compute with, rather than symbols."""
    parts = keras.tree.flatten(arguments)
    if any(isinstance(part, keras.KerasTensor) for part in parts):
        return False
    return any(keras.ops.is_tensor(part) or isinstance(part, np.ndarray) for part in parts)


@contextlib.contextmanager
def _replaced(cls: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    own = name in vars(cls)
    original = getattr(cls, name)
    setattr(cls, name, wrap(original))
    try:
        yield
    finally:
        if own:
            setattr(cls, name, original)
        else:
            delattr(cls, name)
