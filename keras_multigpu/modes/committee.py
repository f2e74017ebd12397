"""The members of a committee: copies of the template with separate weights, trained separately."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.engines import check_alike
from keras_multigpu.modes.apart import seed_of, set_apart

_ADAPTED = "what it was adapted to"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray, enum.Enum)
# What Keras sets after a layer or a model was made.
_LATER = (
    "_build_shapes_dict",
    "_called",
    "_parent_path",
    "_is_compiled",
    "_saved_model_inputs_spec",
)


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
        for layer, own in _pairs(template, model):
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


def _adapt_alike(layer: keras.Layer, own: keras.Layer) -> None:
    """Gives a clone's layer the statistics, or the words, of the template's."""
    for variable, mine in zip(layer.variables, own.variables):
        mine.assign(keras.ops.copy(variable))
    if hasattr(layer, "get_vocabulary") and layer.get_vocabulary() != own.get_vocabulary():
        own.set_vocabulary(layer.get_vocabulary(include_special_tokens=False))
    if hasattr(own, "finalize_state"):
        own.finalize_state()


def _finish(model: keras.Model) -> None:
    """Has layers compute what they keep of the statistics that they were given."""
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


@functools.cache
def _kerass_own() -> frozenset[str]:
    """The attributes that Keras itself sets, in plain layers and models."""
    # Their names and types are given: Keras counts no name, and its default type stays open.
    options = {"name": "plain", "dtype": "float32"}
    plain = keras.layers.Layer(**options), keras.Model(**options)
    return frozenset({*_LATER, *(name for one in plain for name in vars(one))})


def settings_of(model: keras.Model) -> dict[int, dict[str, Any]]:
    """The plain values that are attributes of each layer, by the layer's `id`; not Keras's own."""
    found = {}
    for layer in model._flatten_layers():
        found[id(layer)] = {
            name: _copied(value)
            for name, value in vars(layer).items()
            if name not in _kerass_own() and _is_plain(value)
        }
        if hasattr(layer, "adapt"):
            found[id(layer)][_ADAPTED] = _Adapted(layer)
    return found


def changed_settings(
    before: Mapping[int, Mapping[str, Any]], now: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The settings that differ, of layers that are in both."""
    return {
        key: {
            name: value
            for name, value in own.items()
            if name not in before[key] or not _are_equal(before[key][name], value)
        }
        for key, own in now.items()
        if key in before
    }


class _Adapted:
    """What `adapt`, or a given vocabulary, has replaced in a layer."""

    def __init__(self, layer: keras.Layer):
        self._parts = [getattr(layer, name, None) for name in ("mean", "lookup_table")]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Adapted)
        return all(one is part for one, part in zip(self._parts, other._parts))

    __hash__ = None  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return not any(isinstance(one, keras.layers.Layer) for one in _kept_by(value))
    return isinstance(value, _PLAIN)


def _kept_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function has from where it was made: the defaults, and the variables around it."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def _copied(value: Any) -> Any:
    """A plain value without Keras's wrappers of containers, which know their layer."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if isinstance(value, list):
        return list(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def follow(
    template: keras.Model, model: keras.Model, changed: Mapping[int, Mapping[str, Any]]
) -> None:
    """Freezes and unfreezes a clone's layers like the template's, and changes their settings.

    `changed`: new values of settings, by the `id` of the template's layer.
    """
    for layer, own in _pairs(template, model):
        if own.trainable != layer.trainable:
            own.trainable = layer.trainable
        settings = dict(changed.get(id(layer), {}))
        if settings.pop(_ADAPTED, None) is not None:
            engines.current().in_fresh_thread(functools.partial(_adapt_alike, layer, own))
        for name, value in settings.items():
            setattr(own, name, _copied(value))
    for variable, own in zip(template.variables, model.variables):
        if own.trainable != variable.trainable:
            own.trainable = variable.trainable


def _pairs(template: keras.Model, model: keras.Model) -> Iterator[tuple[Any, Any]]:
    # Keras has no public walk over the layers within layers.
    return zip(template._flatten_layers(), model._flatten_layers())


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
