"""The members of a committee: copies of the template with separate weights, trained separately.

A clone has different seeds wherever the template's configuration has them. A class that passes
fixed numbers on, as in `Dropout(0.5, seed=3)` or `GlorotUniform(seed=1)`, gives all members the
same ones: there each member gets its own from its number.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines import SEED, SEED_STEP, all_layers, check_alike
from keras_multigpu.modes.settings import pairs

_SEEDS = 2**31
_SHOWN = 3  # layers that a warning names


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
    set_apart(template, model, number)
    return model


def _copy_fixed(template: keras.Model, model: keras.Model) -> None:
    """Copies the values that gradients don't train to a clone, whose layers may compute others."""
    for variable, own in zip(template.variables, model.variables):
        if not variable.trainable and "seed_generator" not in variable.path:
            own.assign(keras.ops.copy(variable))  # JAX donates a variable's array
    for layer in all_layers(model):
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def _classes(template: keras.Model) -> dict[str, type]:
    """The user's classes in a model, by name; they need not be registered.

    Raises:
        ValueError: if two classes have the same name.
    """
    found: dict[str, type] = {}
    for layer in all_layers(template):
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
            adapted[key] = _seed_of(value, number)
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


def _seed_of(seed: int, number: int) -> int:
    """The seed of a member in place of the template's."""
    return (seed + number * SEED_STEP) % _SEEDS


def set_apart(template: keras.Model, clone: keras.Model, number: int) -> None:
    """Gives a member its own seeds where they are the template's.

    Weights that such a seed has made are made again.
    """
    for layer, own in pairs(template, clone):
        for name, initializer in _seeded(own).items():
            theirs = vars(layer).get(name)
            if getattr(theirs, "seed", None) != initializer.seed:
                continue
            other = copy.copy(initializer)
            other.seed = _seed_of(initializer.seed, number)
            setattr(own, name, other)
            for variable in own.variables:
                if variable.trainable and _has_made(initializer, variable):
                    variable.assign(other(variable.shape, dtype=variable.dtype))
    for variable, own in zip(template.variables, clone.variables):
        if own.name == SEED:
            seed, state = int(_value(variable)[0]), _value(own)
            if state[0] == seed:
                own.assign(np.array([_seed_of(seed, number), *state[1:]], state.dtype))


def warn_of_equal(members: Sequence[keras.Model]) -> None:
    """Warns if members with separate weights have equal ones, as if not drawn."""
    trained = list(_trained(members))
    drawn = [layer for layer, values in trained if _have_equal(filter(_is_drawn, values))]
    # Zeros and ones may be meant; not if no member has other weights than the first.
    are_equal = all(np.array_equal(one, first) for _, (first, *rest) in trained for one in rest)
    equal = list(dict.fromkeys(drawn or [layer for layer, _ in trained if are_equal]))
    if equal:
        more = f" and {len(equal) - _SHOWN} more" if len(equal) > _SHOWN else ""
        warnings.warn(
            "The members of a committee need different weights to learn different things. "
            f"Received: {len(members)} members with equal weights in "
            f"{', '.join(map(repr, equal[:_SHOWN]))}{more}: an initializer in the model's code "
            "makes the same numbers each time, or `set_weights` gave them. Use one of Keras that "
            "draws, without a fixed seed, or give each of `parallel.replicas` other weights by "
            "`set_weights` before training.",
            stacklevel=3,
        )


def _trained(members: Sequence[keras.Model]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The layer of each trained weight, and its value in each member."""
    owners = {id(v): layer.name for layer in all_layers(members[0]) for v in layer.variables}
    for variables in zip(*(model.variables for model in members)):
        if variables[0].trainable:
            yield owners[id(variables[0])], [_value(variable) for variable in variables]


def _seeded(layer: keras.Layer) -> dict[str, Any]:
    """A layer's initializers with a seed, by the names of its attributes."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, keras.initializers.Initializer)
        and isinstance(getattr(value, "seed", None), int)
    }


def _has_made(initializer: Any, variable: keras.Variable) -> bool:
    if not _is_drawn(_value(variable)):
        return False
    try:
        made = initializer(variable.shape, dtype=variable.dtype)
    except Exception:  # a shape that it refuses (`Orthogonal` takes no vector) is not its own
        return False
    return np.array_equal(np.asarray(made), _value(variable))


def _have_equal(values: Iterable[np.ndarray]) -> bool:
    texts = [value.tobytes() for value in values]
    return len(set(texts)) < len(texts)


def _is_drawn(value: np.ndarray) -> bool:
    """Whether values may be drawn: zeros, ones, and both (identities, forget gates) are not."""
    return len(np.unique(value)) > 2


def _value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(variable.value)
