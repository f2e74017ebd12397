"""Of several processes one falls out of step: all others say so, and so does it."""

import pathlib

import pytest
from support.out_of_step import process
from support.out_of_step.verdicts import judge
from support.out_of_step.ways import WAYS
from support.process_runs import running

SCRIPT = pathlib.Path(process.__file__)
QUICK = ("stops_after_an_epoch", "sets_the_rate_after_a_batch")
# One of each kind; `python -m support.out_of_step` tries all, in half an hour on each backend.
SLOW = (
    "all_fail_and_go_on",
    "another_branch_of_a_layer",
    "another_regularizer",
    "another_sum_in_a_layer",
    "another_sum_in_the_optimizer",
    "a_generator_ends_early",
    "does_not_validate",
    "exits_in_a_callback",
    "halves_a_weight",
    "its_data_are_slow",
    "layers_in_another_order",
    "more_epochs_of_fewer_steps",
    "other_rows",
    "parts_of_fewer_batches",
    "predicts_in_a_callback",
    "raises_after_a_batch",
    "replaces_the_optimizer",
    "sets_a_small_weight_beside_parts",
    "sets_a_variable_of_its_own",
    "sets_a_weight_in_parts_before_all_read_it",
    "sets_a_weight_in_parts_before_it_saves",
    "sets_another_weight_to_the_same",
    "sets_moving_statistics",
    "sets_the_backend_after_an_epoch",
    "sets_weights_before_it_saves",
    "sets_weights_while_predicting",
    "sets_the_momentum_eagerly",
    "shifts_a_seed",
    "single_steps_of_other_class_weights",
    "trains_on_a_batch_in_a_callback",
    "trains_the_template_alone",
)
ODD = 1


def _is_named(way, count, tmp_path):
    assert way in WAYS
    numbers = range(count)
    with running(f"{way}@{ODD}", tmp_path, numbers, count=count, path=SCRIPT) as run:
        ended = run.end()
    texts = [ended[number][1] for number in numbers]
    assert judge(way, ODD, texts) == "right", "\n".join(texts)


@pytest.mark.parametrize(
    "way", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_all_name_the_one_that_falls_out_of_step(way, tmp_path):
    """Of three, so that one differs from most."""
    _is_named(way, 3, tmp_path)


@pytest.mark.slow
def test_the_other_of_two_names_the_one_that_raises_while_it_saves(tmp_path):
    """With more, the backend's own error comes too seldom."""
    _is_named("raises_while_the_others_save", 2, tmp_path)
