"""Processes that meet before a training, and what keeps them from it."""

import contextlib
import socket
import threading
import time
from concurrent import futures

import pytest
from support.worker_processes import free_port

from keras_multigpu.cluster import ClusterError
from keras_multigpu.engines import Address
from keras_multigpu.engines.cluster.remote import check_free
from keras_multigpu.engines.cluster.rendezvous import meet

pytestmark = pytest.mark.backend_free
EQUAL = ("num_processes", "version")


@pytest.fixture
def address():
    port = free_port()
    return Address(f"localhost:{port}", "127.0.0.1", port)


def records_of(*arguments):
    """The records of a meeting, whose connections are closed."""
    records, kept = meet(*arguments)
    for connection in kept.values():
        connection.close()
    return records


@pytest.fixture
def come(address):
    """A call that lets a process come, in a thread."""
    with futures.ThreadPoolExecutor() as threads:

        def come(number, count=3, seconds=20.0, pid=None, version="1"):
            facts = {"num_processes": str(count), "version": version}
            mine = {"host": f"gpu{number}", "pid": pid or f"10{number}", **facts}
            until = time.monotonic() + seconds
            return threads.submit(lambda: records_of(address, number, count, mine, EQUAL, until))

        yield come


def test_all_get_the_records_of_all_in_order(address, come):
    ended = [process.result() for process in [come(2), come(0), come(1)]]
    assert ended[0] == ended[1] == ended[2]
    assert [record["pid"] for record in ended[0]] == ["100", "101", "102"]
    check_free(address)  # for the service that comes after


def test_a_single_process(come):
    assert [record["host"] for record in come(0, count=1).result()] == ["gpu0"]


def test_absent_processes_are_named(address, come):
    host, other = come(0, seconds=1.0), come(2)
    for process in (host, other):
        with pytest.raises(ClusterError, match="joined there in time .absent: process 1") as error:
            process.result()
        assert error.value.host == address.name
        assert "Start all processes with the same `coordinator`" in error.value.cure


def test_nobody_answers(come):
    with pytest.raises(ClusterError, match="in time .*Connection refused"):
        come(1, seconds=0.3).result()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"", b"\0\0\0\4\0\0\0\0\0"])
def test_something_else_answers(answer, address, come):
    with socket.create_server(("127.0.0.1", address.port)) as other:
        with pytest.raises(ClusterError, match="Address already in use.* Only one process has"):
            come(0).result()
        visitor = come(1, seconds=1.0)
        connection, _ = other.accept()
        connection.sendall(answer)
        connection.close()
    with pytest.raises(ClusterError, match="in time"):
        visitor.result()


def test_a_process_waits_while_another_training_has_the_port(address, come):
    with socket.create_server(("127.0.0.1", address.port)) as other:
        visitor = come(1, count=2)
        other.accept()[0].close()
    assert len(come(0, count=2).result()) == len(visitor.result()) == 2


def test_a_number_in_use(come):
    first, host = come(1, pid="7"), come(0)
    time.sleep(0.5)
    second = come(1, pid="8")
    with pytest.raises(ClusterError, match="has joined as process 1: pid 7 on gpu1") as caught:
        second.result()
    assert "Give each process a different `process_id`" in caught.value.cure
    assert come(2).result() == first.result() == host.result()


def test_a_process_that_has_left_comes_again(address, come):
    host = come(0, count=2, seconds=5.0)
    with _connection(address) as first:
        first.sendall(b'{"host": "gpu1", "pid": "7", "process_id": "1"')  # and is killed
    assert [record["pid"] for record in come(1, count=2, pid="8").result()] == ["100", "8"]
    host.result()


def test_a_waiting_process_that_is_started_again(address, come):
    host = come(0)
    record = b'{"host": "a", "pid": "7", "process_id": "1", "num_processes": "3", "version": "1"}\n'
    with _connection(address) as first:
        first.sendall(record)
        time.sleep(0.2)  # it waits for process 2
    again = come(1, pid="8")
    time.sleep(0.2)
    assert come(2).result()[1]["pid"] == again.result()[1]["pid"] == "8"
    host.result()


def test_other_facts(come):
    host, same = come(0), come(1)
    time.sleep(0.5)
    for process in (host, same, come(2, version="2")):
        with pytest.raises(ClusterError, match="It has version 2, and process 0 on gpu0 has 1"):
            process.result()


def test_another_number_of_processes(come):
    host, other = come(0, count=2), come(1, count=5)
    for process in (host, other):
        with pytest.raises(ClusterError, match="It has num_processes 5, and process 0") as caught:
            process.result()
        assert caught.value.host == "gpu1 (process 1, pid 101)"


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n", b"[]\n", b"{}\n", b'"a"\n', b"9" * 20_000]
)
def test_garbage_is_ignored(garbage, address, come):
    host = come(0, count=2)
    with _connection(address) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(garbage)
    assert len(come(1, count=2).result()) == len(host.result()) == 2


@pytest.mark.parametrize("pause", [60.0, 0.2])
def test_a_slow_stranger_delays_nobody_for_long(pause, address, come):
    host, is_over = come(0, count=2), threading.Event()
    with _connection(address) as stranger:

        def dribble():
            while not is_over.wait(pause):
                with contextlib.suppress(OSError):
                    stranger.sendall(b" ")

        thread = threading.Thread(target=dribble)
        thread.start()
        begun = time.monotonic()
        assert len(come(1, count=2).result()) == len(host.result()) == 2
        assert time.monotonic() - begun < 10.0  # 2 in truth
        is_over.set()
        thread.join()


def test_process_0_dies_while_it_answers(address, come):
    with socket.create_server(("127.0.0.1", address.port)) as server:
        visitor = come(1, count=2)
        connection, _ = server.accept()
        connection.sendall(b'keras_multigpu\n{"records": [')
        connection.recv(1000)
        connection.close()
    assert len(come(0, count=2).result()) == len(visitor.result()) == 2


def _connection(address):
    """A connection to process 0, as soon as it listens."""
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", address.port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            threading.Event().wait(0.01)
