"""Draws a model's training: wiring, optimizer, settings, data, devices, modes and trials."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from . import catalogue, inputs, optimizers
from .case import Case, Head, Trial

_TRIALS = {"train": 2, "fit": 1}  # whose loops take almost as long as small models' compilation
_SIZES = [(7, 4), (7, 4), (9, 8), (5, 3), (3, 2), (8, 4), (4, 1)]  # rows, and rows of a batch


def draw_training(rng: random.Random, case: Case) -> Case:
    """The case with a wiring, an optimizer, settings, data and a number of devices."""
    text = " ".join(map(str, case.makes))
    has_tables = any(name in text for name in ("Embedding", "Positions", "Shared", "Rows"))
    found: dict[str, Any] = {"optimizer": optimizers.draw_optimizer(rng, has_tables)}
    parts = [*case.trunk, *(part for head in case.heads for part in head.parts)]
    wirings = ["functional", "functional", "subclassed"]
    if all(part.is_plain for part in parts) and case.start == "i" and len(case.heads) == 1:
        wirings += ["sequential", "lazy"]
    if case.trunk and "=" not in case.sources[0].symbol:
        wirings += ["nested"]
    if any("training=False" in part.form for part in parts):
        wirings = ["subclassed"]  # a graph has its own `training` override that of a call
    if case.mode == "model" and rng.random() < 0.9:  # which takes graphs only
        wirings = [
            wiring for wiring in wirings if wiring in ("functional", "sequential")
        ] or wirings
    found["wiring"] = rng.choice(wirings)
    found["outputs"] = rng.choice(["list", "dict"]) if len(case.heads) > 1 else "single"
    found["n"] = rng.choice([2, 2, 2, 3, 4])
    found["rows"], found["batch"] = rng.choice(_SIZES)
    found["settings"] = _settings(rng)
    found["options"] = _options(rng, case.mode, found["n"])
    found["feeding"], found["fit"] = _feeding(rng, case)
    actions = [rng.choice(["fit", "train"])]
    if found["feeding"] != "arrays":
        actions = ["fit"]
    more = [action for action in ("evaluate", "predict") if rng.random() < 0.1]
    if found["feeding"] == "generator" or "Ragged" in case.sources[0].data:
        more = []
    found["actions"] = (*actions, *more)
    case = dataclasses.replace(case, **found)
    return case.having(trials=_trials(rng, case))


def _options(rng: random.Random, mode: str, count: int) -> tuple[tuple[str, str], ...]:
    if mode != "data" or rng.random() < 0.7:
        return ()
    if count % 2 == 0 and rng.random() < 0.5:
        return (("model_devices", "2"),)
    return (("shard", repr(rng.choice(["optimizer", "weights"]))),)


def sides(case: Case, modes: tuple[str, ...]) -> list[Case]:
    """The case, and the same training by other modes: they share one plain model."""
    rng = random.Random(f"sides of {case.name}")
    is_graph = case.wiring in ("functional", "sequential")
    is_eager_on_jax = catalogue.ON_JAX and ("run_eagerly", "True") in case.settings
    found = [case]
    for mode in modes:
        # Towers that run eagerly on JAX compile in each step.
        if mode == case.mode or (mode == "model" and not is_graph):
            continue
        if mode == "tower" and is_eager_on_jax:
            continue
        n = rng.choice([2, 2, 3, 4])
        found.append(case.having(mode=mode, n=n, options=_options(rng, mode, n)))
    return found


def _trials(rng: random.Random, case: Case) -> tuple[Trial, ...]:
    """Other data for the trained model: none where each step is traced again."""
    settings = dict(case.settings)
    if not catalogue.ON_JAX and "run_eagerly" in settings:
        return ()
    # Of the same batch sizes, which are compiled.
    rest = case.rows % case.batch
    if "train" in case.actions:  # on two batches
        count, sizes = _TRIALS["train"], [case.rows, 2 * case.batch]
    else:
        sizes = [case.batch, case.rows, case.batch + rest, case.rows + case.batch]
        count = _TRIALS["fit"]
    found = []
    for seed in range(1, count + 1):
        data = tuple(inputs.draw_data(rng, source) for source in case.sources)
        found.append(Trial(data, seed, rng.choice(sizes)))
    return tuple(found)


def _settings(rng: random.Random) -> tuple[tuple[str, str], ...]:
    draw = rng.random()
    if catalogue.ON_JAX:  # where each operation that runs alone is compiled
        return (("run_eagerly" if draw < 0.1 else "jit_compile", "True"),)
    if draw < 0.25:
        return (("run_eagerly", "True"),)
    if draw < 0.30:
        return (("jit_compile", "True"),)
    if draw < 0.35:
        return (("steps_per_execution", "2"),)
    return (("jit_compile", "False"),)


def _feeding(rng: random.Random, case: Case) -> tuple[str, tuple[tuple[str, str], ...]]:
    """How the data come, and the other arguments of `fit`."""
    source = case.sources[0]
    if "sparse=True" in source.symbol:
        return "csr", ()
    if "ragged=True" in source.symbol:
        return "dataset", ()
    feeding = rng.choice(["arrays"] * 8 + ["dataset", "generator"])
    is_text = "tf." in source.data
    if feeding == ("dataset" if catalogue.ON_JAX else "generator" if is_text else ""):
        feeding = "arrays"
    if feeding != "arrays":
        has_list = case.inputs == "list" or len(case.heads) > 1  # which tf.data takes for a tensor
        return ("arrays" if has_list else feeding), ()
    fit = []
    head: Head = case.heads[0]
    is_single = len(case.heads) == 1
    if is_single and rng.random() < 0.15:
        fit.append(("sample_weight", "W"))
    elif is_single and head.target.startswith("rng.integers(0, 3") and rng.random() < 0.3:
        fit.append(("class_weight", "{0: 0.5, 1: 2.0, 2: 0.0}"))
    if rng.random() < 0.15:
        fit.append(("validation_data", "(X, Y)"))
    if rng.random() < 0.1:
        fit.append(("epochs", "2"))
    return feeding, tuple(fit)
