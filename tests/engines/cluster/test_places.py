"""Where processes wait, and which of them waits elsewhere."""

import contextlib
import json
import time

import pytest
from support.boards import Told

from keras_multigpu.engines.cluster.places import END, STEP, Places, odd_one

STEPS, ENDS, BEGINS = f"{STEP} on [0]", f"{END}/1/", "loops/2/"
AT_END = (ENDS, "the end of `fit`, after 4 steps")


@pytest.mark.parametrize(
    ("values", "expected"),
    [("aa", None), ("ab", (1, 0)), ("aba", (1, 0)), ("abb", (0, 1)), ("aabb", (2, 0)), ("a", None)],
)
def test_the_odd_one_differs_from_most(values, expected):
    assert odd_one(list(values)) == expected


def board_with(**others):
    return Told(**{f"places__{k[1:]}": json.dumps(place) for k, place in others.items()})


def test_a_process_at_another_operation_is_found():
    board = board_with(_1=(0, *AT_END))
    places = Places(board, 0, 2, 60.0)
    assert places.find_odd(board.entries) is None  # this one is at none
    with places.at(STEPS, "step 5 of `fit`"):
        assert places.find_odd(board.entries) == (
            1,
            "It is at the end of `fit`, after 4 steps, and process 0 is at step 5 of `fit`.",
        )
    assert json.loads(board.entries["places/0"]) == [0, STEPS, "step 5 of `fit`"]


@pytest.mark.parametrize("other", [(0, STEPS, "step 1"), (1, STEPS, "step 2"), (3, ENDS, "end")])
def test_a_process_that_comes_late_is_none(other):
    """What it has written stays true: of the same operation, or of an earlier or later one."""
    board = board_with(_1=other)
    places = Places(board, 0, 2, 60.0)
    for _ in range(2):
        with places.at(STEPS, "a step"):
            assert places.find_odd(board.entries) is None


@pytest.mark.parametrize(
    ("kinds", "odd"),
    [
        ((STEPS, ENDS), 1),
        ((ENDS, STEPS), 0),  # who goes on with the steps is not odd
        ((BEGINS, ENDS), 0),
        ((ENDS, BEGINS), 1),
        ((BEGINS, "weights 1/1/"), 1),
        ((STEPS, ENDS, ENDS), 0),
        ((ENDS, STEPS, ENDS), 1),
        ((STEPS, ENDS, BEGINS), 1),
        ((STEPS, ENDS, STEPS, ENDS), 1),
    ],
)
def test_all_name_the_same_one(kinds, odd):
    told = {f"_{k}": (0, kind, kind) for k, kind in enumerate(kinds)}
    for number, kind in enumerate(kinds):
        board = board_with(**told)
        places = Places(board, number, len(kinds), 0.0)
        with places.at(kind, kind):
            found = places.find_odd(board.entries)
            assert found is not None
            assert found[0] == odd


def test_the_first_of_them_judges_when_all_are_there():
    board = board_with(_1=(0, *AT_END))
    first, second = (Places(board, number, 3, 60.0) for number in (0, 1))
    with first.at(STEPS, "a step"), second.at(*AT_END):
        assert first.find_odd(board.entries) is None  # the third may come
        assert second.find_odd(board.entries) is None
        board.write("places/2", json.dumps((0, *AT_END)))
        assert first.find_odd(board.entries)[0] == 0
        assert second.find_odd(board.entries) is None  # it leaves that to the first


def test_the_second_judges_if_nobody_else_does():
    board = board_with(_1=(0, *AT_END))
    first, second = (Places(board, number, 3, timeout=0.2) for number in (0, 1))
    with first.at(STEPS, "a step"), second.at(*AT_END):
        assert first.find_odd(board.entries) is second.find_odd(board.entries) is None
        time.sleep(0.15)
        assert first.find_odd(board.entries)[0] == 1  # the third does not come
        assert second.find_odd(board.entries) is None
        time.sleep(0.1)
        assert second.find_odd(board.entries)[0] == 1


@pytest.mark.parametrize(("numbers", "odd"), [((0, 1, 0), 1), ((0, 1, 1), 0), ((0, 1), 1)])
def test_one_that_has_gone_on_alone_made_another_operation(numbers, odd):
    """With fewer steps at once it takes their results, and the others wait at the next step."""
    told = {f"_{k}": (number, *AT_END) for k, number in enumerate(numbers)}
    places = Places(board_with(**told), 0, len(numbers), timeout=0.1)
    with places.at(STEPS, "step 5"):
        assert places.find_odd(places._board.entries) is None  # it may be about to go on, too
        time.sleep(0.15)
        found = places.find_odd(places._board.entries)
    assert found[0] == odd
    assert "step 5" in found[1]
    for slow in (places.at(STEPS, "results", is_meeting=False), places.at_steps(lambda: 1, str)):
        for other in range(1, len(numbers)):
            places._board.write(f"places/{other}", json.dumps((9, *AT_END)))
        with slow:  # it computes for long, and nobody has to wait for it
            assert places.find_odd(places._board.entries) is None
            time.sleep(0.15)
            assert places.find_odd(places._board.entries) is None


def test_steps_are_counted_as_they_come():
    board, come = Told(), []
    places = Places(board, 0, 2, 60.0)
    with places.at_steps(come.__len__, lambda: f"step {len(come)}"):
        places.find_odd(board.entries)
        assert not board.entries  # it waits for data
        for number in (0, 1, 2):
            come.append(1)
            places.find_odd(board.entries)
            assert json.loads(board.entries["places/0"]) == [number, STEP, f"step {number + 1}"]
    with places.at_steps(lambda: 0, str):
        pass
    with places.aside(), places.at(BEGINS, "what the others leave their places for"):
        places.find_odd(board.entries)
    with places.at(*AT_END):
        places.find_odd(board.entries)
    assert json.loads(board.entries["places/0"]) == [3, *AT_END]


def test_a_process_that_goes_on_meanwhile_tells_nothing():
    """A thread asks."""
    board = board_with(_1=(0, *AT_END))
    places = Places(board, 0, 2, 60.0)
    with contextlib.ExitStack() as scopes:

        def go_on():
            scopes.enter_context(places.at(BEGINS, "elsewhere"))
            return "step 1"

        with places.at_steps(lambda: 1, go_on):
            assert places.find_odd(board.entries) is None
            assert "places/0" not in board.entries
