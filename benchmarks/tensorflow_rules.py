"""The partitioner's rules as a table: what each does, and which operations have it.

    python -m benchmarks.tensorflow_rules

Nothing is computed.
"""

from __future__ import annotations

import collections
import inspect
from typing import Any

from benchmarks.processes import markdown_table
from keras_multigpu.engines.tensorflow.partition.rules import RULES


def main() -> None:
    operations = collections.defaultdict[Any, list[str]](list)
    for name, rule in RULES.items():
        operations[inspect.unwrap(rule)].append(f"`{name}`")
    rows = [
        (
            f"`{rule.__module__.rpartition('.')[2]}.py`",
            (rule.__doc__ or "").partition("\n")[0],
            ", ".join(sorted(names)),
        )
        for rule, names in operations.items()
    ]
    print(f"{len(RULES)} types of operations, {len(operations)} rules.\n")
    print(markdown_table(("module", "rule", "operations"), rows))


if __name__ == "__main__":
    main()
