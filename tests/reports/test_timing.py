"""Rounds of steps: which are kept, and when there are enough."""

import keras
import pytest

from keras_multigpu import reports
from keras_multigpu.reports import timing
from keras_multigpu.reports.timing import Measured, Timing

pytestmark = pytest.mark.backend_free
NOISE = (3.8, 0.9, 2.7, 0.3, 1.9)


class Steps:
    """Steps whose rounds take what is given."""

    def __init__(self, *rounds):
        self._left = list(rounds)

    def warm_up(self, least):
        return least

    def time(self, steps):
        wall = self._left.pop(0)
        return wall, 2 * wall


def test_rounds_go_on_until_those_kept_agree():
    noisy, quiet = Steps(*NOISE, 0.21, 0.2, 0.2, 0.22, 0.2, 9.9), Steps(*[0.1] * 11)
    first, second = timing._time_in_turn([noisy, quiet], 1)
    assert first.rounds == (0.2, 0.2, 0.2, 0.21, 0.22)
    assert first.cpu_rounds == (0.4, 0.4, 0.4, 0.42, 0.44)
    assert second.rounds == (0.1,) * 5
    assert noisy._left == [9.9]


def test_rounds_that_never_agree_end(monkeypatch):
    monkeypatch.setattr(timing, "_PATIENCE", 0)
    (found,) = timing._time_in_turn([Steps(*NOISE, 0.2)], 1)
    assert found.rounds == tuple(sorted(NOISE))
    assert not found.is_steady


@pytest.mark.parametrize("slow", ["whole", "fewer"])
def test_a_prediction_from_rounds_that_differ_is_doubted(slow, monkeypatch):
    def measure(model, batch, sizes, *others):
        whole, fewer = (3.7, 3.8, 3.9), (1.8, 1.9, 2.0)  # as if all of it shrank with the rows
        rounds = ((0.2, *whole[1:]), fewer) if slow == "whole" else (whole, (*fewer[:2], 3.8))
        timings = {("data", 1, rows): Timing(own, own) for rows, own in zip(sizes, rounds)}
        return Measured(*sizes, timings)

    monkeypatch.setattr(timing, "measure_steps", measure)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    advice = reports.advise(model, 16, (2,), link="nvlink4", speed=2)
    assert advice.predictions[0].speedup == pytest.approx(2, abs=0.01)
    assert advice.predictions[0].speedup_range[0] <= 1.01
    assert advice.verdicts["data"].startswith("Measure it")
    assert "Rounds on one device differ" in advice.verdicts["data"]
