"""Cases for every rule of the partitioner."""

import dataclasses

from support.rule_cases import contractions, convolutions, elementwise, matrices, parts, rows

CASES = {
    **elementwise.CASES,
    **contractions.CASES,
    **convolutions.CASES,
    **rows.CASES,
    **matrices.CASES,
    **parts.CASES,
}
# oneDNN has kernels of its own for these, in single precision only.
_IN_SINGLE = (
    "Conv",
    "Depthwise",
    "MaxPool",
    "AvgPool",
    "Softmax",
    "LogSoftmax",
    "MatMul",
    "BatchMatMul",
)


def _in_single(case):
    data = tuple(one if ":" in one else f"{one}:f" for one in case.data)
    return dataclasses.replace(case, data=data, tolerance=1e-4)


for _kind, _cases in CASES.items():
    if _kind.startswith(_IN_SINGLE) and _kind != "BatchMatMulV3":
        _cases += [_in_single(one) for one in _cases if not any(":f" in text for text in one.data)]
