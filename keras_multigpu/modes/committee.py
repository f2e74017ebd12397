"""The members of a committee: copies of the template with separate weights, trained separately."""

from __future__ import annotations

import inspect
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import h5py
import keras

from keras_multigpu.engines import check_alike
from keras_multigpu.modes.apart import seed_of, set_apart
from keras_multigpu.modes.settings import pairs


def clone(template: keras.Model, number: int) -> keras.Model:
    """A model like the template, with different seeds.

    Trainable weights are initialized anew; everything else (frozen weights, moving statistics,
    vocabularies) is copied from the template if it is there.

    Raises:
        ValueError: if the template can't be rebuilt from its configuration.
    """
    _check_arguments(template)
    try:
        config = keras.saving.serialize_keras_object(template)
        config.pop("compile_config", None)
        if "name" in config["config"]:
            config["config"]["name"] = f"{template.name}_{number}"
        classes = _classes(template)
        model = keras.saving.deserialize_keras_object(
            _adapt(config, number, classes), custom_objects=classes, safe_mode=False
        )
        for layer, own in pairs(template, model):
            if layer.built and not own.built:
                own.build_from_config(layer.get_build_config())
            if hasattr(layer, "save_assets"):
                _copy_assets(layer, own)
    except Exception as error:  # a user's class may raise anything; our error says it
        raise ValueError(
            "Independent replicas are made from the template's configuration. Received: "
            f"model={template!r}, from whose configuration no equal model could be made "
            f"({type(error).__name__}: {error}). Give its classes a `get_config` from which "
            "`from_config` makes them again, register its functions with "
            "`keras.saving.register_keras_serializable()`, or use `replicas='shared'`."
        ) from error
    check_alike([template.variables, model.variables])
    _copy_fixed(template, model)
    _finish(model)
    set_apart(template, model, number)
    return model


def _copy_fixed(template: keras.Model, model: keras.Model) -> None:
    """Copies the template's values that gradients don't train to a clone."""
    for variable, own in zip(template.variables, model.variables):
        if not variable.trainable and "seed_generator" not in variable.path:
            own.assign(keras.ops.copy(variable))  # JAX donates a variable's array


def _finish(model: keras.Model) -> None:
    """Has layers compute what they keep of the statistics that they were given."""
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def _classes(template: keras.Model) -> dict[str, type]:
    """The user's classes in a model, by name; they need not be registered.

    Raises:
        ValueError: if two classes have the same name.
    """
    found: dict[str, type] = {}
    for layer in template._flatten_layers():
        cls = type(layer)
        if found.setdefault(cls.__name__, cls) is not cls:
            raise ValueError(
                "Independent replicas are made from the template's configuration, which "
                f"identifies classes by name. Received: two classes named {cls.__name__!r}, "
                f"{found[cls.__name__]} and {cls}. Rename one of them."
            )
    return {name: cls for name, cls in found.items() if not cls.__module__.startswith("keras.")}


def _check_arguments(template: keras.Model) -> None:
    """Refuses classes with unknown arguments: a clone would get the defaults."""
    for cls in _classes(template).values():
        own_config = any("get_config" in vars(base) for base in _users(cls))
        init = next((base for base in _users(cls) if "__init__" in vars(base)), None)
        parameters = list(inspect.signature(init).parameters.values()) if init else []
        named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [name for name in named if name not in ("name", "trainable", "dtype")]
        if unknown and not own_config:
            raise ValueError(
                "Independent replicas are made from the template's configuration, in which the "
                f"arguments of all classes must stand. Received: {cls.__name__}, which takes "
                f"{', '.join(unknown)} and has no `get_config`. Give it one that returns them, "
                "beside what `super().get_config()` does, or use `replicas='shared'`."
            )


def _users(cls: type) -> list[type]:
    """A class and its bases, without Keras's."""
    return [base for base in cls.__mro__[:-1] if not base.__module__.startswith("keras.")]


def _adapt(config: Any, number: int, classes: dict[str, type]) -> Any:
    """A configuration with different seeds, without arguments that a class does not take.

    Keras writes `name`, `dtype` and `trainable` for each layer, and also passes them to users'
    classes that don't have these arguments.
    """
    if isinstance(config, (list, tuple)):
        return type(config)(_adapt(part, number, classes) for part in config)
    if not isinstance(config, dict):
        return config
    adapted: dict[str, Any] = {}
    for key, value in config.items():
        is_seed = key == "seed" and isinstance(value, int) and not isinstance(value, bool)
        if is_seed:
            adapted[key] = seed_of(value, number)
        elif key == "shared_object_id":
            adapted[key] = f"{value} in clone {number}"  # else clones would share it
        else:
            adapted[key] = _adapt(value, number, classes)
    if config.get("class_name") in classes:
        parameters = inspect.signature(classes[config["class_name"]]).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for key in {"name", "trainable", "dtype"} - set(parameters):
                adapted["config"].pop(key, None)
    return adapted


def _copy_assets(layer: keras.Layer, own: keras.Layer) -> None:
    """Copies what a layer saves in files besides weights: a vocabulary, say."""
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(Path(folder))
        own.load_assets(Path(folder))


@keras.ops.custom_gradient
def mean_of_apart(*losses: Any) -> Any:
    """The mean of losses, with the gradient of their sum: each loss is minimized separately."""

    def backward(*args: Any, upstream: Any = None) -> tuple[Any, ...]:
        (upstream,) = args if upstream is None else (upstream,)  # by the backend
        return (upstream,) * len(losses)

    return sum(losses) / len(losses), backward


def check_loss_scale(optimizer: keras.Optimizer) -> None:
    """Warns of an optimizer that skips steps, because it skips them for all members."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        warnings.warn(
            "Where gradients overflow, a `LossScaleOptimizer` skips the step. With "
            "`loss_of='replicas'` the replicas are trained apart but share one optimizer, so "
            "an overflow in one of them skips the step for all. Received: "
            f"optimizer={optimizer.name!r}. Use the policy 'mixed_bfloat16', which needs no loss "
            "scale.",
            stacklevel=4,
        )


def members_in(path: Any) -> int | None:
    """How many members a weights file has, 1 of a plain model; `None` if it does not say."""
    if not (str(path).endswith(".weights.h5") and os.path.isfile(path) and h5py.is_hdf5(path)):
        return None
    with h5py.File(path, "r") as file:
        return 1 + len(file["clones"]) if "clones" in file else 1
