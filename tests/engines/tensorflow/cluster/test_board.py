"""What joined processes write for each other."""

import math
import socket
import time

import pytest

from keras_multigpu.engines.tensorflow.cluster.board import SocketBoard


@pytest.fixture
def boards():
    """Those of three processes."""
    pairs = {number: socket.socketpair() for number in (1, 2)}
    first = SocketBoard(0, {number: pair[0] for number, pair in pairs.items()})
    made = [first, *(SocketBoard(number, {0: pair[1]}) for number, pair in pairs.items())]
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


def test_who_has_gone_is_known_at_once(boards):
    boards[1].write("failures/1", "stopped")
    boards[1].stop(5.0)
    wait_until(lambda: boards[0].silence(1) == math.inf)
    wait_until(lambda: boards[2].silence(1) == math.inf)
    assert boards[2].read("failures/") == {"1": "stopped"}  # the reason came first
    assert boards[0].silence(2) < 5
    assert boards[2].service_silence() < 5
    boards[0].stop(5.0)
    wait_until(lambda: boards[2].service_silence() == math.inf)


def test_silence_grows_without_signs_of_life():
    near, far = socket.socketpair()
    with far:
        board = SocketBoard(0, {1: near})
        wait_until(lambda: board.silence(1) > 0.5)
        far.sendall(b'{"beat": 1}\n')
        wait_until(lambda: board.silence(1) < 0.5)
        far.sendall(b"no JSON\n")
        wait_until(lambda: board.silence(1) == math.inf)
        board.stop(5.0)
