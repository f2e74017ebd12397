"""Cases for every rule of the partitioner."""

from support.rule_cases import contractions, elementwise, parts, rows

CASES = {**elementwise.CASES, **contractions.CASES, **rows.CASES, **parts.CASES}
