"""The trainings of a case: of a plain model, of a parallel one, and again with other data."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np

import keras_multigpu

from . import catalogue, rounding
from .case import Case


def start() -> None:
    """Gives each model the same names and the same initial weights."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)


class Training:
    """A model that was trained once, and that can be trained again with a trial's data.

    Attributes:
        result: what the first training gave.
        begin: the weights and the optimizer's state after it, from which the trials start.
    """

    def __init__(
        self, names: dict[str, Any], model: keras.Model, disturbed: int = 0, seed: int = 4
    ):
        self._names, self._model, self._disturbed = names, model, disturbed
        x = rounding.disturb(names["X"], disturbed) if disturbed else names["X"]
        with rounding.replaced(names, X=x):
            # Not before each trial: TensorFlow then optimizes all functions again.
            keras.utils.set_random_seed(seed)
            self.result = self._results("use")
        self.begin = [np.asarray(variable) for variable in self._variables()]

    def trial(self, number: int, begin: list[np.ndarray]) -> dict[str, Any]:
        """The results of a trial: other data, from changed weights.

        The step is not compiled again, so a trial takes milliseconds.
        """
        # `AugMix` chooses its operations by Python's random numbers, which other models have drawn
        # since; on JAX in each step, because Keras does not compile a model with this layer.
        random.seed(number)
        rng = np.random.default_rng(number)
        trained = {id(variable) for variable in self._model.trainable_variables}
        for variable, value in zip(self._variables(), begin, strict=True):
            if id(variable) in trained:
                value = value * rng.uniform(0.5, 1.5, size=value.shape)
            variable.assign(rounding.disturb(value, self._disturbed) if self._disturbed else value)
        self._model.reset_metrics()
        data = self._names["TRIALS"][number]()
        if self._disturbed:
            data["X"] = rounding.disturb(data["X"], self._disturbed)
        with rounding.replaced(self._names, **data):
            return self._results("again")

    def _variables(self) -> list[keras.Variable]:
        return [*self._model.weights, *self._model.optimizer.variables]

    def _results(self, action: str) -> dict[str, Any]:
        model = self._model
        out = self._names[action](model)
        out["weights"] = [np.asarray(weight) for weight in model.weights]
        out["optimizer"] = [np.asarray(variable) for variable in model.optimizer.variables]
        # Keras counts rows for the logs of single outputs' losses if the trace knows how many there
        # are, and batches otherwise: the logs are equal, the trackers are not.
        out["metrics"] = [
            np.asarray(variable)
            for variable in model.metrics_variables
            if not variable.path.startswith("compile_loss/")
        ]
        return out


def plain(
    names: dict[str, Any],
    *,
    eager: bool,
    disturbed: int = 0,
    outputs: int = 0,
    scale: float = 1.0,
    reseeded: int = 0,
) -> Training:
    """Trains the model without this library.

    Args:
        names: the names of the case's text.
        eager: whether it runs eagerly, whatever the case's settings.
        disturbed: if not 0, the seed by which weights and data change in their last digits.
        outputs: if not 0, the seed by which outputs change in their last digit.
        scale: the size of losses and gradients until the optimizer divides them by it.
        reseeded: what is added to the seeds of random layers, and Python's.
    """
    start()
    model = names["build"]()
    if disturbed and model.built:
        model.set_weights(rounding.disturb(model.get_weights(), disturbed))
    for variable in model.variables if reseeded else ():
        if "seed_generator" in variable.path:
            variable.assign(variable + reseeded)
    if outputs:
        rounding.disturb_outputs(model, outputs)
    original = model.compile

    def compiled(**settings: Any) -> None:
        own = {"run_eagerly": True, "jit_compile": False} if eager else {}
        original(**{**settings, **own})
        if scale != 1.0:
            model.optimizer.loss_scale_factor = scale * (model.optimizer.loss_scale_factor or 1.0)

    model.compile = compiled
    return Training(names, model, disturbed, seed=4 + reseeded)


def parallel(case: Case, names: dict[str, Any]) -> Training:
    """Trains the model as a parallel one."""
    start()
    options = {name: eval(value) for name, value in case.options}
    model = keras_multigpu.make_parallel(names["build"](), case.n, mode=case.mode, **options)
    return Training(names, model)


def disturbances(case: Case) -> list[dict[str, Any]]:
    """The arguments of `plain` with which rounding alone makes a difference."""
    found: list[dict[str, Any]] = [{"disturbed": seed} for seed in (1, 2, 3)]
    found += [{"outputs": seed} for seed in (1, 2)]
    names = [make.name for make in case.makes]
    if not any(one in name for name in names for one in ("Embedding", "Rows")):  # Keras fails
        found += [{"scale": 3.0}, {"scale": 1 / 3}]
    return found


def disturbed(case: Case, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Plain Keras's results with disturbed last digits."""
    # JAX keeps what was compiled before; logs of several outputs are others if Keras runs eagerly.
    eager = not catalogue.ON_JAX and len(case.heads) == 1
    found = [plain(names, eager=eager, **how).result for how in disturbances(case)]
    if rounding.turns(case, names):
        other = {name: rounding.turned(case, names[name]) for name in ("X", "Y", "W")}
        with rounding.replaced(names, **other):
            result = plain(names, eager=eager).result
        if "predict" in result:
            result["predict"] = rounding.turned(case, result["predict"])
        found.append(result)
    return found
