"""Of several processes one falls out of step: all others say so, and so does it."""

import pathlib

import pytest
from support.out_of_step import process
from support.out_of_step.verdicts import judge
from support.out_of_step.ways import WAYS
from support.process_runs import running

SCRIPT = pathlib.Path(process.__file__)
QUICK = ("fewer_epochs", "sets_the_rate_after_a_batch")
ODD = 1


@pytest.mark.parametrize(
    "way", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in WAYS]
)
def test_all_name_the_one_that_falls_out_of_step(way, tmp_path):
    """Of three, so that one differs from most."""
    numbers = range(3)
    with running(f"{way}@{ODD}", tmp_path, numbers, count=3, path=SCRIPT) as run:
        ended = run.end()
    texts = [ended[number][1] for number in numbers]
    assert judge(way, ODD, texts) == "right", "\n".join(texts)
