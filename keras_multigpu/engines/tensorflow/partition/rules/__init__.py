"""What happens to an operation: its rule, by classes of operations.

A rule takes the planner, the traced operation and the values of its inputs. It returns a
`Signature`, or the values of the outputs (with a word on how, if it is an operation that counts),
or `None`: then the operation is computed whole. An operation without a rule always is.
"""

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
    pieces,
    ragged,
    random,
    recurrent,
    reductions,
    rows,
    shapes,
    sparse,
    state,
)
from keras_multigpu.engines.tensorflow.partition.rules.table import RULES

__all__ = ["RULES"]
