"""All of Keras's optimizers, with their settings."""

from __future__ import annotations

import random

import keras

from . import values
from .case import Make

NOT_DRAWN = {
    "Optimizer": "the base class",
    "LossScaleOptimizer": "drawn around others",
    "OptimizerMap": "a part of MultiOptimizer",
    "MultiOptimizer": "chosen by variables, which a case has not got yet",
}
_SHARED = {
    "clipnorm": ["0.1", "1.0"],
    "clipvalue": ["0.05"],
    "global_clipnorm": ["0.1", "1.0"],
    "ema_overwrite_frequency": ["2"],
    "gradient_accumulation_steps": ["2", "3"],
    "loss_scale_factor": ["8.0"],
    "use_ema": ["True"],
    "weight_decay": ["0.01"],
}
_OWN = {
    "amsgrad": values.FLAGS,
    "centered": values.FLAGS,
    "momentum": ["0.9"],
    "nesterov": values.FLAGS,
    "relative_step": values.FLAGS,
    "beta_1": ["0.5"],
    "beta_2": ["0.9"],
    "l1_regularization_strength": ["0.01"],
    "l2_shrinkage_regularization_strength": ["0.01"],
    "exclude_embeddings": values.FLAGS,
    "warmup_steps": ["2"],
}
_RATES = ["0.01", "0.1", "keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)"]


def draw_optimizer(rng: random.Random, has_tables: bool) -> Make:
    """An optimizer with some of its settings: with embeddings, of those that Keras can scale."""
    name = rng.choice([*drawable(), "SGD", "Adam", "RMSprop"])
    there = values.arguments(getattr(keras.optimizers, name))
    arguments = [("learning_rate", rng.choice(_RATES))]
    arguments += _some(rng, _OWN, there, 0.2)
    shared = _some(rng, _SHARED, there, 0.1)
    shared = [pair for pair in shared if not (has_tables and pair[0] == "loss_scale_factor")]
    clips = [pair for pair in shared if "clip" in pair[0]]
    arguments += [pair for pair in shared if pair not in clips[1:]]  # Keras takes one of them
    make = Make(f"keras.optimizers.{name}", tuple(arguments))
    if not has_tables and rng.random() < 0.03:
        return Make("keras.optimizers.LossScaleOptimizer", (("", str(make)),))
    return make


def drawable() -> list[str]:
    """The names of the optimizers that are drawn."""
    found = values.classes(keras.optimizers, keras.optimizers.Optimizer)
    return sorted(set(found) - set(NOT_DRAWN))


def _some(rng: random.Random, table: dict, there: list[str], share: float) -> list:
    return [
        (name, rng.choice(choices))
        for name, choices in table.items()
        if name in there and rng.random() < share
    ]
