"""Warnings and errors where a user has several devices, and without a word would train on one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.functions import calls, named_in
from keras_multigpu.modes.one_model import OneModel

_TRAINING = ("fit", "train_on_batch")


def watch_template(template: Any, devices: int) -> None:
    """Warns when a template is trained before any parallel model of it is used.

    Stand-ins for the template's `fit` and `train_on_batch`, which remove themselves at the first
    use of either model. The two share their attributes, so they are called for both.
    """
    for method in _TRAINING if devices > 1 else ():
        if method not in vars(template):
            vars(template)[method] = types.MethodType(_watch(template, method, devices), template)


def _watch(template: Any, method: str, devices: int) -> Any:
    @functools.wraps(getattr(type(template), method))
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_use(self)
        if not isinstance(self, OneModel):
            warnings.warn(
                f"{self.name!r} is trained on one device: a parallel model of it, on {devices} "
                f"devices, was made and never used. Received: `{method}` of the model itself. Call "
                "that of what `make_parallel` returns: `parallel = make_parallel(model)`, "
                "`parallel.compile(...)`, `parallel.fit(...)`.",
                stacklevel=2,
            )
        return getattr(self, method)(*args, **kwargs)

    train.is_watch = True  # type: ignore[attr-defined]
    return train


def note_use(model: Any) -> None:
    """A model is used: its template, the same for all its parallel models, is watched no more."""
    for method in _TRAINING:
        if getattr(vars(model).get(method), "is_watch", False):
            del vars(model)[method]


@contextlib.contextmanager
def watch_kept(model: Any) -> Iterator[None]:
    """Scope of a report: its steps are no use of a model, and its template is watched again."""
    own = vars(model)
    watches = {name: own[name] for name in _TRAINING if hasattr(own.get(name), "is_watch")}
    note_use(model)
    try:
        yield
    finally:
        note_use(model)
        own.update(watches)


def warn_of_template(parallel: Any, step: Callable[..., Any]) -> None:
    """Warns if a user's step calls the template in place of the parallel model."""
    names = [name for name, one in named_in(step).items() if one is parallel.template]
    if len(parallel.devices) > 1 and any(calls(step, name) for name in names):
        warnings.warn(
            f"The step calls {parallel.template.name!r} itself, which one device computes: in mode "
            f"{parallel.mode!r} only calls of the parallel model run on {len(parallel.devices)} "
            "devices. Call what `make_parallel` returned: `parallel(x)`, and update "
            "`parallel.trainable_variables`.",
            stacklevel=3,
        )


class Compilation(NamedTuple):
    """How a template and its parallel model are compiled: Keras makes a new object each time."""

    template: Any
    parallel: Any
    learning_rate: float | None  # of the template
    iterations: float | None  # after how many steps


def compilation(parallel: Any) -> Compilation:
    """How a template and its parallel model are compiled now."""
    optimizer: Any = getattr(parallel.template, "optimizer", None)
    given = (getattr(optimizer, name, None) for name in ("learning_rate", "iterations"))
    numbers = [None if one is None else float(keras.ops.convert_to_tensor(one)) for one in given]
    both = [getattr(one, "_compile_config", None) for one in (parallel.template, parallel)]
    return Compilation(*both, *numbers)


def check_compiled(parallel: Any, method: str) -> None:
    """Refuses a parallel model that is not compiled, if its template is, or if it was."""
    if not parallel.compiled and parallel._parallel_undone:
        raise ValueError(
            f"A model is compiled again after its `{parallel._parallel_undone}` was set. Received: "
            f"`{method}` of {parallel.name!r}, which was compiled before. Call "
            "`parallel.compile(...)`."
        )
    if not parallel.compiled and parallel.template.compiled:
        cure = ", or compile the template before `make_parallel`, which then compiles the parallel "
        cure += "model likewise."
        if parallel._parallel_compilation:  # it was, and could not be copied: a warning said why
            cure = ": how its template is compiled could not be copied."
        raise ValueError(
            f"A parallel model is compiled apart from its template. Received: `{method}` of the "
            f"parallel model {parallel.name!r}, which is not compiled; its template is. Call "
            f"`parallel.compile(...)`{cure}"
        )
    if parallel._parallel_compilation:
        _warn_of_compiling(parallel, method, parallel._parallel_compilation)


def _warn_of_compiling(parallel: Any, method: str, before: Compilation) -> None:
    """Warns once if only the template was compiled again, or got another learning rate."""
    now = compilation(parallel)
    is_compiled = now.template is not before.template
    is_by_steps = now.iterations != before.iterations  # a schedule
    is_set = now.learning_rate != before.learning_rate and not is_by_steps
    if now.parallel is not before.parallel or not (is_compiled or is_set):
        return
    parallel._parallel_compilation = None
    told = (
        "The template was compiled again after `make_parallel`; the parallel model "
        f"{parallel.name!r} goes on as it was compiled."
    )
    cure = "Call `parallel.compile(...)` too"
    if not is_compiled:
        told = (
            "The learning rate of the template's optimizer was set after `make_parallel`; the "
            f"parallel model {parallel.name!r} has an optimizer of its own."
        )
        cure = "Set `parallel.optimizer.learning_rate`"
    warnings.warn(
        f"{told} Received: `{method}` of the parallel model. {cure}, if it is meant.", stacklevel=6
    )


def controls(template: Any) -> tuple[Any, Any]:
    """Whether a template was told to stop, and the history of its own training."""
    return vars(template).get("stop_training"), vars(template).get("history")


def check_controls(parallel: Any, before: tuple[Any, Any]) -> None:
    """Warns if a callback has stopped the template, or set its learning rate, in vain."""
    check_compiled(parallel, "fit")
    is_stopped, history = controls(parallel.template)
    if is_stopped and not before[0] and history is before[1]:  # not by its own training
        warnings.warn(
            f"`stop_training` of the template {parallel.template.name!r} was set while its "
            "parallel model was trained, which goes on. Set it of the parallel model: "
            "`self.model.stop_training = True` in a callback.",
            stacklevel=5,
        )


def warn_of_cloning(parallel: Any) -> None:
    """Warns if `keras.models.clone_model` is copying a parallel model: it knows templates only."""
    clone = inspect.unwrap(keras.models.clone_model).__code__
    frame, level, is_cloned = sys._getframe(1), 2, False
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        is_cloned |= frame.f_code is clone and frame.f_locals.get("model") is parallel
        frame, level = frame.f_back, level + 1
    if is_cloned:
        warnings.warn(
            "`keras.models.clone_model` copies the template of a parallel model: the clone is a "
            f"plain model, and runs on one device. Received: {parallel.name!r}, in mode "
            f"{parallel.mode!r} on {number_of(len(parallel.devices), 'device')}. Make the clone "
            "parallel: `make_parallel(clone)`. If you want a plain model, clone "
            "`parallel.template`.",
            stacklevel=level,
        )


_LIBRARIES = ("keras", "keras_multigpu")
