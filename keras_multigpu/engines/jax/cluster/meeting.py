"""Where the processes that train a model together meet: at each call, and at each file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from keras_multigpu.engines.jax.cluster.joint import describe

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def meet(steps: Any, call: str) -> None:
    """Begins a call of a model's together with the other processes that have its devices.

    Args:
        steps: the `JaxSteps` of a parallel model.
        call: what is called: `"fit"`, say.

    Raises:
        ClusterError: if they call something else, or with another model, or one is lost.
    """
    group = steps.where.group
    if group is not None:
        facts = {"model": describe(steps.model), "devices": ", ".join(steps.model.devices)}
        group.begin(call, facts)


def part(steps: Any, error: BaseException | None = None) -> None:
    """Ends a call together with the other processes, or tells them why this one has left it.

    Raises:
        ClusterError: if they took another number of steps, or one is lost.
    """
    group = steps.where.group
    if group is not None and error is None:
        group.end()
    elif group is not None:
        steps.has_met = False
        group.fail(error)


def write_once(steps: Any, loop: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a loop, without the callbacks that only process 0 is to have.

    Args:
        steps: the `JaxSteps` of a parallel model.
        loop: its `fit`, `evaluate` or `predict`.
        args: what it is given.
        kwargs: what it is given by name.
    """
    group = steps.where.group
    if group is None or group.is_writer:
        return args, kwargs
    given = inspect.signature(loop).bind_partial(*args, **kwargs)
    for arguments in (given.arguments, given.kwargs):
        callbacks = arguments.get("callbacks")
        if callbacks is not None and not isinstance(callbacks, keras.callbacks.CallbackList):
            listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            arguments["callbacks"] = [_in_place_of(one) for one in listed]
    return given.args, given.kwargs


def _in_place_of(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return _Restore(callback)
    return keras.callbacks.Callback() if isinstance(callback, _WRITERS) else callback


class _Restore(keras.callbacks.Callback):
    """What is left of a `BackupAndRestore` where another process writes the files."""

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        self._callback = callback

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._callback.on_train_begin(logs)


@contextlib.contextmanager
def writing(steps: Any) -> Iterator[bool]:
    """A scope in which process 0 writes a file, and the others wait.

    Within a loop they don't wait here: they come to the next step, and wait there.

    Args:
        steps: the `JaxSteps` of a parallel model.
    """
    group = steps.where.group
    if group is None or steps.is_running:
        yield group is None or group.is_writer
        return
    try:
        meet(steps, "the writing of a file")
        yield group.is_writer
        part(steps)
    except BaseException as error:
        part(steps, error)
        raise
