"""What processes do together: meet, begin and end calls, compare models, write files."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import random
import socket
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group

COMPARED = 1024
"""How many elements of each array in a batch the processes compare."""

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


_LOOPS = ("training", "evaluating", "predicting")
# What a process may have called by itself: the template's `predict`, say.
_OWN_AFFAIRS = frozenset(
    ["name", "built", *(f"stop_{loop}" for loop in _LOOPS)]
    + [f"{kind}_function" for kind in ("train", "test", "predict")]
)


class JointSteps(Protocol):
    """A model's `Steps`, as this module uses them.

    Attributes:
        group: the processes that share the model's devices; `None` if this process has them all.
        model: the model.
        is_running: whether a loop is running.
        call: the latest call that the processes have made together.
    """

    model: Any
    is_running: bool
    call: Call | None

    @property
    def group(self) -> Group | None:
        """The processes."""


def describe_process(count: int, data: str, **facts: str) -> dict[str, str]:
    """What the others are told of this process, `facts` of the backend included."""
    states = (random.getstate(), np.random.get_state(legacy=False))
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "num_processes": str(count),
        "data": data,
        "Keras": keras.__version__,
        "keras_multigpu": importlib.metadata.version("keras-multigpu"),
        # A checksum: equal in processes that have set the same seed.
        "random numbers": str(zlib.crc32(repr(states).encode())),
        "seed": str(random.SystemRandom().randrange(2**31)),
        **facts,
    }


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


def digest_of(arrays: Sequence[Any], count: int) -> int:
    """A 31-bit checksum of arrays: shapes, types, and about `count` values of each."""
    digest = 0
    for leaf in arrays:
        array = np.asarray(leaf)
        some = array.reshape(-1)[:: max(1, array.size // count)]
        digest = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), digest)
        digest = zlib.crc32(some.tobytes(), digest)
    return digest >> 1


def describe(model: keras.Model) -> str:
    """A checksum of a model's layers, what it was compiled with, and the shapes of its weights."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    known = (
        type(model).__qualname__,
        [_settings(layer) for layer in model._flatten_layers()],
        [(tuple(one.shape), str(one.dtype), one.trainable) for one in variables],
        _settings(optimizer),
        (model.run_eagerly, model.steps_per_execution),
        _form_of_compiled(model),
    )
    return f"{type(model).__name__} of checksum {zlib.crc32(repr(known).encode()):08x}"


def _settings(part: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The class of a layer or optimizer, and its plain settings."""
    kept = []
    for name, value in sorted(vars(part).items()) if part is not None else ():
        if name.startswith("_") or name in _OWN_AFFAIRS:
            continue
        if _is_plain(value):
            kept.append((name, repr(value)))
        elif callable(value) and hasattr(value, "__name__"):
            kept.append((name, value.__name__))
        elif isinstance(value, (keras.Loss, keras.Optimizer)):
            kept.append((name, repr(_form(value))))
    return type(part).__qualname__, kept


def _form_of_compiled(model: keras.Model) -> Any:
    """What a model's loss and metrics are, as far as all processes can compare it."""
    # Keras keeps here what its own `compile` got.
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    named = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return [(name, _form(config.get(name))) for name in named]


def _form(value: Any) -> Any:
    """A loss or a metric, or several: classes, names of functions, settings."""
    if value is None or _is_plain(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_form(one) for one in value]
    if isinstance(value, Mapping):
        return [(key, _form(value[key])) for key in value]
    if isinstance(value, functools.partial):
        return _form(value.func), _form(value.args), _form(value.keywords)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        own = [one for one in value.__code__.co_consts if isinstance(one, float)]
        given = [one for one in (*cells, *(value.__defaults__ or ())) if _is_plain(one)]
        return value.__name__, own, given
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if not hasattr(value, "__dict__"):
        return type(value).__qualname__
    given = vars(value).get("_fn_kwargs")  # of a function that Keras wraps
    return _settings(value), _form(given)


def _is_plain(value: Any) -> bool:
    """Whether `repr` gives the same text in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


@contextlib.contextmanager
def together(steps: JointSteps, name: str, is_loop: bool = True) -> Iterator[None]:
    """Scope of a call (`"fit"`) that all processes begin together, and end if it is a loop.

    Single steps of a model are one call until another one begins; in its loop they are the loop's.
    """
    group = steps.group
    if group is None or (steps.is_running and not is_loop):
        yield
        return
    call = None
    try:
        call = steps.call
        if is_loop or call is None or not group.resume(call):
            steps.call = call = group.open(is_loop)
            facts = {"model": describe(steps.model), "devices": ", ".join(steps.model.devices)}
            group.meet(name, facts)
        yield
        if is_loop:
            group.end(call)
    except BaseException as error:
        group.fail(error, call)
        group.close(call)
        raise
    if is_loop:
        group.close(call)


def write_once(steps: JointSteps, loop: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a loop (`fit`, ...); only process 0 keeps callbacks that write files."""
    group = steps.group
    if group is None or group.is_writer:
        return args, kwargs
    given = inspect.signature(loop).bind_partial(*args, **kwargs)
    # A method `fit(self, *args, **kwargs)` has them in its `kwargs`.
    kinds = {name: known.kind for name, known in given.signature.parameters.items()}
    more = [name for name in given.arguments if kinds[name] is inspect.Parameter.VAR_KEYWORD]
    for arguments in (given.arguments, *(given.arguments[name] for name in more)):
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
        yield group.is_writer
