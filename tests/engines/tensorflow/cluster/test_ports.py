"""Ports for TensorFlow's servers: nobody else gets them, and others can try them."""

import pathlib
import socket

import pytest
from support import failing_starts
from support.process_runs import running

from keras_multigpu.engines.tensorflow.cluster.runtime import find_unreached, kept_port

SCRIPT = pathlib.Path(failing_starts.__file__)


def test_only_who_shares_a_port_gets_it():
    with kept_port("127.0.0.1") as (address, listening):
        listening.close()
        place = (address.ip, address.port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        with socket.create_server(place, reuse_port=True), socket.create_connection(place, 5):
            pass


def test_a_port_is_reached_until_it_is_taken_over():
    with kept_port("127.0.0.1") as (first, _), kept_port("127.0.0.1") as (second, listening):
        addresses = [first.numeric, second.numeric]
        assert find_unreached(addresses, 5) == {}
        listening.close()
        assert find_unreached(addresses, 5) == {1: addresses[1]}


@pytest.mark.slow
def test_a_process_that_is_not_reached_is_named_by_all(tmp_path):
    with running("unreached", tmp_path, numbers=(0, 1, 2), count=3, path=SCRIPT) as run:
        for status, output in run.end().values():
            assert status == 1, output
            assert f"(process 1, pid {run.processes[1].pid}): Process 0 can't reach it" in output


@pytest.mark.slow
def test_nobody_waits_for_a_process_whose_runtime_does_not_start(tmp_path):
    with running("fails", tmp_path, path=SCRIPT) as run:
        ended = run.end()
    assert "RuntimeError: no runtime" in ended[1][1]
    status, output = ended[0]
    assert status == 1, output
    assert "Timeout (0:00:08)!" in output
    assert "in _start" in output
