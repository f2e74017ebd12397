"""What `keras_multigpu.cluster` refuses before it does anything, and the error that it raises."""

import pickle
import socket

import numpy as np
import pytest

from keras_multigpu import cluster

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize("workers", [[], "127.0.0.1:2222", None, {"127.0.0.1:2222"}])
def test_no_list(workers):
    with pytest.raises(
        ValueError, match="must be a list of one or more addresses.*Received: workers="
    ):
        cluster.connect(workers)


@pytest.mark.parametrize(
    "worker",
    ["gpu7", "gpu7:0", "gpu7:70000", ":2222", "[::1]", "[gpu7]:2222", "fe80::1:2222", 2222],
)
def test_no_address(worker):
    with pytest.raises(ValueError, match="`workers` must have the form 'HOST:PORT'") as error:
        cluster.connect([worker])
    assert f"Received: {worker!r}" in str(error.value)


def test_wrong_arguments_of_connect_and_serve():
    for timeout in (0, 2.9, "30", True, None):
        with pytest.raises(ValueError, match="`timeout` must be a number of seconds, 3 or more"):
            cluster.connect(["127.0.0.1:2222"], timeout=timeout)
    with pytest.raises(ValueError, match="each address once.*'localhost:2222' and '127.0.0.1:22"):
        cluster.connect(["localhost:2222", "127.0.0.1:2222"])
    with pytest.raises(ValueError, match="`local` must have the form"):
        cluster.connect(["127.0.0.1:2222"], local="2222")
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match="`virtual_devices` must be a positive integer"):
            cluster.serve(virtual_devices=count)
    with pytest.raises(ValueError, match="`bind` must have the form 'HOST:PORT'"):
        cluster.serve("2222")


def test_the_error_is_pickled():
    error = pickle.loads(pickle.dumps(cluster.ClusterError("a:1", "It is lost.", "Find it.")))
    assert (str(error), error.host) == ("a:1: It is lost. Find it.", "a:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", 2, 2), "`process_id` must be an integer from 0 .* num_processes=2, process_id=2"),
        (("a:1", 2, True), "`process_id` must be .*process_id=True"),
        (("a:1", 0, 0), "`num_processes` must be a positive integer. Received: num_processes=0"),
        (("a", np.int64(2), np.int64(0)), "`coordinator` must have the form 'HOST:PORT'"),
    ],
)
def test_wrong_arguments_of_join(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.join(*arguments)
    with pytest.raises(ValueError, match="`timeout` must be a number of seconds, 3 or more.*=2"):
        cluster.join("127.0.0.1:1234", 2, 0, timeout=2)
    with pytest.raises(ValueError, match='`data` must be "same" or "parts". Received: data=None'):
        cluster.join("127.0.0.1:1234", 2, 0, data=None)


def test_a_name_without_an_address(monkeypatch):
    def find(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    for call in (
        lambda: cluster.connect(["gpu7:2222"]),
        lambda: cluster.serve("gpu7:2222"),
        lambda: cluster.join("gpu7:2222", 2, 0),
    ):
        with pytest.raises(cluster.ClusterError, match="no address of 'gpu7'") as error:
            call()
        assert error.value.host == "gpu7:2222"
        assert "give the host's IP address" in error.value.cure


@pytest.mark.parametrize(
    ("name", "numeric"),
    [
        ("[fd00:0::7]:2222", "[fd00::7]:2222"),
        ("[::ffff:10.0.0.7]:2222", "10.0.0.7:2222"),
        ("10.0.0.7:2222", "10.0.0.7:2222"),
    ],
)
def test_addresses(name, numeric):
    found = cluster._find_address("bind", name)
    assert (found.name, found.numeric) == (name, numeric)


def test_ipv4_is_preferred(monkeypatch):
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 2222, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 2222)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert cluster._find_address("bind", "gpu7:2222").numeric == "10.0.0.7:2222"
    both.pop()
    assert cluster._find_address("bind", "gpu7:2222").numeric == "[fd00::7]:2222"
