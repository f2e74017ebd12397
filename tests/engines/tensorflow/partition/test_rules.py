"""Every rule: the operation itself on one device, and spread over three."""

import pytest
from support.rule_cases import CASES
from support.rule_cases.check import check, check_elsewhere

from keras_multigpu.engines.tensorflow.partition.rules import RULES, control, lists, state
from keras_multigpu.engines.tensorflow.partition.rules.random import draw_whole

# Tested where whole steps are.
ELSEWHERE = {*control.RULES, *lists.RULES, *state.RULES} - {"AddN", "ZerosLike"}
EVERY = [
    pytest.param(one, id=f"{kind}-{n}")
    for kind, all_ in CASES.items()
    for n, one in enumerate(all_)
]


@pytest.mark.backend_free
def test_every_type_has_a_case():
    drawn_whole = {
        kind for kind in RULES if getattr(RULES[kind], "__wrapped__", None) is draw_whole
    }
    assert set(RULES) - ELSEWHERE - drawn_whole <= set(CASES)


@pytest.mark.parametrize("case", EVERY)
def test_symbolic(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY)
def test_static(case):
    check(case, is_static=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in EVERY if one.values[0].is_compilable])
def test_compiled(case):
    check(case, (7, 2), compiled=True)


# TensorFlow's kernels of these write over their last input if nothing else uses it.
WRITES_OVER_ITS_INPUT = ("MaxPoolGradGrad", "MaxPool3DGradGrad")
SEVERAL = [
    one
    for one in EVERY
    if sum("B" in text for text in one.values[0].data) > 1
    and ":s" not in one.values[0].data[0]
    and one.values[0].type not in WRITES_OVER_ITS_INPUT
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL)
def test_drawn(case):
    check(case, is_drawn=True)


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", EVERY)
def test_elsewhere(case):
    check_elsewhere(case)
