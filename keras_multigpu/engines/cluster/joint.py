"""What processes do together: meet, begin and end calls, compare models, write files."""

from __future__ import annotations

import collections
import contextlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.cluster.model_facts import facts_of_compilation, facts_of_model

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class JointSteps(Protocol):
    """A model's `Steps`, as this module uses them.

    Attributes:
        group: the processes that share the model's devices; `None` if this process has them all.
        model: the model.
        is_running: whether a loop is running.
        call: the latest call that the processes have made together.
        number: which model it is, of those that the processes have made for all their devices.
    """

    model: Any
    is_running: bool
    call: Call | None
    number: int | None

    @property
    def group(self) -> Group | None:
        """The processes."""

    @property
    def settings(self) -> str:
        """Those of the backend that change what a step computes."""

    def compare_weights(self, group: Any) -> None:
        """Raises a `ClusterError` if another process has other weights."""


def check_owners(group: Group, devices: Sequence[str], owners: set[int], mode: str) -> None:
    """Raises a `ValueError` for devices of other processes that a model can't use.

    `owners` are the numbers of the processes that have the devices.
    """
    if owners <= {group.number}:
        return
    absent = sorted(set(range(len(group.names))) - owners)
    if absent:
        raise ValueError(
            "A model uses devices of this process only, or at least one device of every "
            f"process that has joined. Received: devices={list(devices)!r}, with none of "
            f"process {', '.join(map(str, absent))}. This is process {group.number}. Leave "
            "`n_gpus` and `devices` out to use all, or join fewer processes."
        )
    if mode != "data":
        raise ValueError(
            f"Only mode 'data' can use several processes. Received: mode={mode!r} and "
            f"devices={list(devices)!r}, of {len(owners)} processes. Use mode 'data', or devices "
            "of this process only."
        )


@contextlib.contextmanager
def together(
    steps: JointSteps,
    name: str,
    given: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    is_loop: bool = True,
) -> Iterator[None]:
    """Scope of a call (`"fit"`) that all processes begin together, and end if it is a loop.

    Single steps of a model are one call until another one begins, or one with another
    `class_weight`; in its loop they are the loop's.
    `given` are the call's arguments.
    """
    group = steps.group
    if group is None or (steps.is_running and not is_loop):
        yield
        return
    call = None
    try:
        call = steps.call
        class_weight = _text(given.get("class_weight"))
        # `test_on_batch` has no such argument.
        is_as_before = "class_weight" not in given or (call and call.class_weight == class_weight)
        if is_loop or call is None or not is_as_before or not group.calls.resume(call):
            steps.call = call = group.open(name, is_loop)
            call.class_weight = class_weight
            facts: dict[str, str | Listing] = {
                "devices": ", ".join(steps.model.devices),
                "set of options": repr(sorted(steps.model._parallel_options.items())),
                "model": facts_of_model(steps.model),
                "compilation": facts_of_compilation(steps.model),
                "model's number, in the order of making,": str(steps.number),
                "set of the backend's settings": steps.settings,
                "class_weight": class_weight,
                "range of epochs": f"{given.get('initial_epoch', 0)} to {given.get('epochs', 1)}",
            }
            group.meet(facts)
        yield
        if is_loop:
            group.end(call)
    except BaseException as error:
        group.fail(error, call)
        group.calls.close(call)
        raise
    if is_loop:
        group.calls.close(call)


def _text(class_weight: Any) -> str:
    is_dictionary = isinstance(class_weight, Mapping)
    return repr(sorted(map(repr, class_weight.items())) if is_dictionary else class_weight)


def arguments(loop: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a loop or step (`fit`, ...), by name; none if it does not take them."""
    try:
        bound = inspect.signature(loop).bind_partial(*args, **kwargs)
    except TypeError:  # the loop says so itself
        return {}
    bound.apply_defaults()
    return dict(collections.ChainMap(*_named(bound)))


def _named(bound: inspect.BoundArguments) -> list[dict[str, Any]]:
    """Arguments by name; a method `fit(self, *args, **kwargs)` has more of them in its `kwargs`."""
    kinds = {name: known.kind for name, known in bound.signature.parameters.items()}
    more = [name for name in bound.arguments if kinds[name] is inspect.Parameter.VAR_KEYWORD]
    return [bound.arguments, *(bound.arguments[name] for name in more)]


def write_once(steps: JointSteps, loop: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a loop (`fit`, ...); only process 0 keeps callbacks that write files."""
    group = steps.group
    if group is None or group.is_writer:
        return args, kwargs
    bound = inspect.signature(loop).bind_partial(*args, **kwargs)
    for arguments in _named(bound):
        callbacks = arguments.get("callbacks")
        if callbacks is not None and not isinstance(callbacks, keras.callbacks.CallbackList):
            listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            arguments["callbacks"] = [_in_place_of(one) for one in listed]
    return bound.args, bound.kwargs


def _in_place_of(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return _Restore(callback)
    return keras.callbacks.Callback() if isinstance(callback, _WRITERS) else callback


class _Restore(keras.callbacks.Callback):
    """Restores, as `BackupAndRestore` does, and leaves the backups to process 0."""

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        self._callback = callback

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._callback.on_train_begin(logs)


@contextlib.contextmanager
def writing(steps: JointSteps) -> Iterator[bool]:
    """Scope for writing a model file: yields True in process 0; the others wait.

    Within `fit` they don't wait here, but at the next step.
    """
    group = steps.group
    if group is None or steps.is_running:
        yield group is None or group.is_writer
        return
    with together(steps, "the writing of a file"):
        steps.compare_weights(group)
        yield group.is_writer


NO_WHOLE_NUMBER = (
    "Where each process gives its part of a batch, `predict` returns the outputs of its rows: an "
    "output must have a whole number of rows for each row of the batch."
)


def check_has_rows(output: Any) -> None:
    """Raises a `ValueError` for an output without rows."""
    if not len(output.shape):
        raise ValueError(
            f"{NO_WHOLE_NUMBER} Received: an output of shape (), without rows. Return one value "
            "per row, or join with `data='same'`."
        )
