"""make_parallel: check the request, choose the devices, hand over to the mode's model."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_model, did_you_mean, number_of
from keras_multigpu.devices import choose_devices, warn_of_apart, warn_of_one_cpu
from keras_multigpu.meant import find_cure, find_place_of_strategy
from keras_multigpu.modes import (
    OPTIONS,
    DataParallel,
    ModelParallel,
    ParallelModel,
    TowerParallel,
    build_parallel,
    making_template,
    mode_with,
    watch_template,
)

Mode = Literal["data", "tower", "model"]
_Mix: TypeAlias = (
    Literal["mean", "weighted", "gaussian", "gated"] | keras.Layer | Callable[[list[Any]], Any]
)

MODES: dict[str, type[ParallelModel]] = {
    "data": DataParallel,
    "tower": TowerParallel,
    "model": ModelParallel,
}
# What others call it, and what it is here.
_OTHER_NAMES = {
    ("committee", "ensemble"): "`mode='tower', replicas='independent'`",
    ("spread", "tensor", "tp", "wide"): "`mode='model', placement='spread'`",
    ("fsdp", "shard", "zero", "weights"): "`mode='data', shard='weights'`",
    ("mesh", "hybrid"): "`mode='data', model_devices=2`",
    ("pipeline", "pp"): "`mode='model'`",
    ("mirrored", "dp", "ddp", "data_parallel"): "`mode='data'`",
}
_OF_KERAS = {"batch_size": "fit", "epochs": "fit"} | dict.fromkeys(
    ("optimizer", "loss", "metrics", "jit_compile", "run_eagerly", "steps_per_execution"), "compile"
)


@overload
def make_parallel(
    model: keras.Model | Callable[[], keras.Model],
    n_gpus: int | None = None,
    mode: Literal["data"] = "data",
    *,
    devices: Sequence[str] | None = None,
    wire_dtype: Literal["bfloat16", "float16"] | None = None,
    shard: Literal["optimizer", "weights"] | None = None,
    model_devices: int = 1,
) -> DataParallel: ...


@overload
def make_parallel(
    model: keras.Model | Callable[[], keras.Model],
    n_gpus: int | None = None,
    mode: Literal["tower"] = ...,
    *,
    devices: Sequence[str] | None = None,
    replicas: Literal["shared", "independent"] = "shared",
    mix: _Mix = "mean",
    num_replicas: int | None = None,
    loss_of: Literal["mix", "replicas"] | None = None,
) -> TowerParallel: ...


@overload
def make_parallel(
    model: keras.Model | Callable[[], keras.Model],
    n_gpus: int | None = None,
    mode: Literal["model"] = ...,
    *,
    devices: Sequence[str] | None = None,
    placement: Mapping[str, int] | str | None = None,
) -> ModelParallel: ...


def make_parallel(
    model: keras.Model | Callable[[], keras.Model],
    n_gpus: int | None = None,
    mode: Mode = "data",
    *,
    devices: Sequence[str] | None = None,
    **options: Any,
) -> ParallelModel:
    """Makes a Keras model use several devices.

    The model becomes the *template* of a parallel model. The two share their weights in both
    directions. The template stays as it is, and you can use it alone at any time.

    Args:
        model: any Keras model, built or not, trained or not. Or a function that makes one, for a
            model that does not fit on one device: with `shard`, or in mode `"model"`, its weights
            are made in the host's memory, and move to their devices one at a time.
        n_gpus: how many devices to use. `None` takes all GPUs of the host, or its CPU device if it
            has no GPU. Virtual devices (`use_virtual_devices`) count as GPUs.
        mode: `"data"` spreads the step of one device: each device computes a slice of every batch,
            with the maths of one device. `"tower"` runs every replica on the whole batch
            and mixes their outputs by a layer. `"model"` puts the layers of one model, with their
            weights, on different devices.
        devices: the names of the devices to use, as `list_devices` gives them, instead of a number.
        **options: the options of the mode.

            Mode `"data"`:

            - `wire_dtype`: the type in which weights and gradients are sent between devices.
              `None` keeps their own type. `"bfloat16"` and `"float16"` halve the traffic of float32
              weights. JAX takes only `None`.
            - `shard`: what is spread over the devices, so that each keeps a part of it: the same
              maths in less memory. `"optimizer"` spreads the optimizer's slots, `"weights"` the
              weights too. `None` spreads nothing.
            - `model_devices`: how many devices compute a slice of the batch together. Each of them
              has a part of the weights of large layers, as with `placement="spread"`. With 8
              devices and `model_devices=2`, a batch has four slices, and each device half of a
              large layer. It divides the number of devices, of joined processes that of each.
              With `shard`, the devices that have the same part divide it once more: each of the
              8 keeps an eighth.

            Mode `"tower"`:

            - `replicas`: `"shared"` replicas have one set of weights. `"independent"` replicas have
              separate weights: a committee of the model and others built like it.
            - `mix`: `"mean"`, `"weighted"`, `"gaussian"`, `"gated"`, a Keras layer, or a function
              of the list of outputs.
            - `num_replicas`: the number of replicas; by default one per device.
            - `loss_of`: `"mix"` trains the mixed output. `"replicas"` trains each replica by its
              own loss. This is the default of independent replicas, unless the mix has weights or
              the model has its own `train_step`.

            Mode `"model"`:

            - `placement`: a dict from names of layers, or regular expressions, to device numbers.
              `"spread"` spreads large layers over all devices: each has a part of the kernel.
              `None` chooses: on JAX, and of subclassed models, large layers are spread. JAX takes
              no dict.

    Returns:
        A Keras model with the template's inputs, outputs, layers and weights, and the attributes
        `template`, `devices` and `mode`. If the model is compiled, so is the result. The optimizer
        keeps its state if it trains the same weights.

    Raises:
        ValueError: if the request can't be met. The text says what was expected, what was
            received, and how to fix it.
        TypeError: if the mode has no such option, or `devices` is not a list of names.
        RuntimeError: if the Keras backend is not supported.

    Warns:
        UserWarning: if it uses the CPU device because there is no GPU, or `n_gpus=1` in a process
            that has joined others; once in a process. And if the template is trained before any
            parallel model of it is used.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> parallel = make_parallel(model, n_gpus=4)
        >>> parallel.compile(optimizer="sgd", loss="mse")
        >>> history = parallel.fit(np.ones((70, 3)), np.ones((70, 1)), batch_size=32, verbose=0)
        >>> parallel.devices
        ('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3')
        >>> bool(np.all(parallel.get_weights()[0] == model.get_weights()[0]))
        True
        >>> committee = make_parallel(model, n_gpus=4, mode="tower", replicas="independent")
        >>> np.shape(committee.predict_replicas(np.ones((5, 3)), verbose=0))
        (4, 5, 1)
    """
    engine = engines.current()
    request = _check(model, n_gpus, mode, devices, options)
    if n_gpus is None and devices is None and request.devices == ("cpu:0",):
        warn_of_one_cpu()
    if n_gpus == 1 and devices is None and engine.num_processes > 1:
        warn_of_apart()
    asked = "all" if n_gpus is None else None
    parallel = build_parallel(MODES[mode], request, asked if devices is None else request.devices)
    watch_template(parallel.template, len(parallel.devices))
    return parallel


def _check(
    model: Any, n_gpus: Any, mode: Any, devices: Any, options: dict[str, Any]
) -> engines.Request:
    is_function = inspect.isroutine(model) or isinstance(model, functools.partial)
    if not is_function:
        check_template(model)
    if not isinstance(mode, str) or mode not in MODES:
        asked = str(mode).lower()
        raise ValueError(
            f"`mode` must be one of {', '.join(map(repr, MODES))}. Received: mode={mode!r}."
            f"{_by_other_name(asked) or find_place_of_strategy(mode) or did_you_mean(asked, MODES)}"
        )
    known = options_of(mode)
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"mode={mode!r} has the options {', '.join(known)}. Received: {name}={value!r}."
                f"{_find_cure(name, value, known)}"
            )
    if isinstance(n_gpus, str) and n_gpus in MODES:
        raise ValueError(
            f"`n_gpus` must be a positive integer. Received: n_gpus={n_gpus!r}. "
            f"Write `mode={n_gpus!r}`."
        )
    chosen = choose_devices(n_gpus, devices)
    template = _made_by(model, mode, chosen, options) if is_function else model
    return engines.Request(mode, template, chosen, options)


def _made_by(
    make: Callable[[], Any], mode: str, devices: Sequence[str], options: dict[str, Any]
) -> Any:
    """The template that a function makes."""
    MODES[mode]._parallel_check(options)  # before what may take long
    needed = [
        str(one)
        for one in (() if inspect.isbuiltin(make) else inspect.signature(make).parameters.values())
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            "A function that makes a model is called without arguments. Received: "
            f"{getattr(make, '__name__', make)!r}, which needs {', '.join(needed)}. Give "
            "`lambda: make_model(...)`."
        )
    with making_template(MODES[mode], devices, options) as is_moved:
        template = make()
    if not isinstance(template, keras.Model):
        raise ValueError(
            "A function that makes a model must return it. Received: "
            f"{getattr(make, '__name__', make)!r}, which returns {template!r}."
        )
    check_template(template)
    if is_moved and not engines.is_built(template):
        raise ValueError(
            "A function whose model is spread over the devices must return a built model, whose "
            f"weights exist. Received: {template.name!r}, which is not built. Give it an input "
            "shape (`keras.Input`), or call it in the function."
        )
    return template


def check_template(model: Any) -> None:
    """Refuses what is not a Keras model, and what is a parallel one already."""
    place = "" if isinstance(model, keras.Model) else find_place_of_strategy(model)
    check_model(model, place and f" The model comes first.{place}")
    if isinstance(model, ParallelModel):
        raise ValueError(
            f"`model` is a parallel model already, on {number_of(len(model.devices), 'device')}. "
            f"Received: model={model!r}. Pass its template, `model.template`: an ordinary "
            "model, which is compiled apart."
        )


def options_of(mode: str) -> Sequence[str]:
    """The names of a mode's options."""
    return OPTIONS[mode]


def _by_other_name(asked: str) -> str:
    """What a mode is here that others call otherwise; `""` if that can't be told."""
    return next((f" Give {cure}." for names, cure in _OTHER_NAMES.items() if asked in names), "")


def _find_cure(name: str, value: Any, known: Sequence[str]) -> str:
    """What was meant by an option that a mode doesn't have, as far as its name tells."""
    if owner := mode_with(name):
        return f" It is an option of mode={owner!r}."
    if place := find_place_of_strategy(value):
        return place
    is_number = ("gpu" in name.lower() or "device" in name.lower()) and "model" not in name.lower()
    if is_number:
        return find_cure(name, value, choose_devices(None, None)) or " Did you mean `n_gpus`?"
    if isinstance(value, str) and value in MODES:
        return f" Write `mode={value!r}`."
    if name == "strategy" and (cure := _by_other_name(str(value).lower())):
        return cure
    if name in _OF_KERAS:
        return f" Give it to `{_OF_KERAS[name]}`."
    alike = difflib.get_close_matches(name, known, 1, 0.7)
    return f" Did you mean `{alike[0]}`?" if alike else ""
