"""What joined processes write for each other."""

import math
import socket
import time

import pytest

from keras_multigpu.engines.cluster.board import Board


@pytest.fixture
def pairs():
    """The connections of process 0 to two others, by their number."""
    found = {number: socket.socketpair() for number in (1, 2)}
    yield found
    for pair in found.values():
        for end in pair:
            end.close()


@pytest.fixture
def boards(pairs):
    """Those of three processes."""
    first = Board(0, {number: pair[0] for number, pair in pairs.items()})
    made = [first, *(Board(number, {0: pair[1]}) for number, pair in pairs.items())]
    yield made
    for board in made:
        board.stop(5.0)


def wait_until(is_so):
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_all_read_what_one_writes(boards):
    for number, board in enumerate(boards):
        board.write(f"here/{number}", "yes")
    for board in boards:
        wait_until(lambda board=board: board.read("here/") == dict.fromkeys("012", "yes"))
    boards[2].write("here/2", None)
    for board in boards:
        wait_until(lambda board=board: set(board.read("here/")) == {"0", "1"})
    assert boards[1].read("here/", seconds=0.001)["0"] == "yes"


def test_who_has_gone_is_known_at_once(boards, pairs):
    boards[1].write("failures/1", "stopped")
    pairs[1][1].shutdown(socket.SHUT_RDWR)  # as the end of the process does
    wait_until(lambda: boards[0].silence(1) == math.inf)
    wait_until(lambda: boards[2].silence(1) == math.inf)
    assert boards[2].read("failures/") == {"1": "stopped"}  # the reason came first
    assert boards[0].silence(2) < 5
    assert boards[2].silence(0) < 5
    pairs[2][0].shutdown(socket.SHUT_RDWR)
    wait_until(lambda: boards[2].silence(0) == math.inf)


def test_silence_grows_without_signs_of_life():
    near, far = socket.socketpair()
    with near, far:
        board = Board(0, {1: near})
        wait_until(lambda: board.silence(1) > 0.5)
        far.sendall(b'{"beat": 1}\n')
        wait_until(lambda: board.silence(1) < 0.5)
        far.sendall(b"no JSON\n")
        wait_until(lambda: board.silence(1) == math.inf)
        board.stop(5.0)
