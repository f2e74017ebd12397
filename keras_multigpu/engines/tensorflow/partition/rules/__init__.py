"""What happens to an operation: its rule, by classes of operations.

A rule takes the planner, the traced operation and the values of its inputs. It returns a
`Signature`, or the values of the outputs (with a word on how, if it is an operation that counts),
or `None`: then the operation is computed whole. An operation without a rule always is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_multigpu.engines.tensorflow.partition.rules import (
    blocks,
    branches,
    contractions,
    diagonals,
    elementwise,
    gathers,
    lists,
    loops,
    matrices,
    optionals,
    parts,
    ragged,
    random,
    recurrent,
    reductions,
    rows,
    shapes,
    sparse,
    state,
)

RULES: dict[str, Callable[..., Any]] = {}
for _room in (
    elementwise,
    contractions,
    rows,
    blocks,
    matrices,
    diagonals,
    reductions,
    shapes,
    parts,
    gathers,
    random,
    recurrent,
    sparse,
    ragged,
    state,
    branches,
    loops,
    lists,
    optionals,
):
    assert not RULES.keys() & _room.RULES.keys(), RULES.keys() & _room.RULES.keys()
    RULES.update(_room.RULES)
