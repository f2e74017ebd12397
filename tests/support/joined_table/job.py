"""What is trained: a model of the table, its data, and the sizes of batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
    """A training of one model, then its evaluation and its predictions.

    Attributes:
        name: what the results are called.
        case: the model's name in the table of cases.
        seed: that of the data.
        rows: how many are trained on.
        batch: rows of a batch in `fit`.
        epochs: of `fit`.
        few: rows of `evaluate` and `predict`.
        few_batch: rows of a batch there.
        floatx: the type of weights and data.
        shard: what the devices of each process have in parts, of small variables too.
    """

    name: str
    case: str
    seed: int = 7
    rows: int = 67
    batch: int = 32
    epochs: int = 2
    few: int = 33
    few_batch: int = 16
    floatx: str = "float32"
    shard: str | None = None


# Their code, or Keras's, computes in float32 whatever the type of the weights.
_IN_FLOAT32 = {"own_steps", "losses_in_own_step"}


def table(cases: list[str], floatx: str) -> list[Job]:
    """Every model once. The last batch has 3 rows in `fit`, and one in the other loops."""
    return [Job(case, case, floatx=floatx) for case in cases]


def draw(cases: list[str], seed: int, count: int) -> list[Job]:
    """Trainings in float64 of models that are drawn, with sizes of batches that are drawn."""
    jobs = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        case = str(rng.choice([name for name in cases if name not in _IN_FLOAT32]))
        sizes: dict[str, Any] = {
            "rows": int(rng.integers(1, 61)),
            "batch": int(rng.integers(1, 41)),
            "epochs": int(rng.integers(1, 3)),
            "few": int(rng.integers(1, 31)),
            "few_batch": int(rng.integers(1, 21)),
        }
        data = int(rng.integers(2**31))
        jobs.append(Job(f"{seed}-{number}", case, data, floatx="float64", **sizes))
    return jobs
