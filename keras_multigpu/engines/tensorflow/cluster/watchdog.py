"""A program that ends another process's connections to lost workers.

TensorFlow sends every new function to the workers while it holds Python's lock. If a worker freezes
then, no thread of that process can run, so this is a separate process. It imports neither
TensorFlow nor the package. Its arguments are the number of a socket, the seconds of silence that
are allowed, and the workers' addresses. The connections arrive through the socket: a byte with
the worker's number, and with it the file descriptor.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import grpc

STATUS = "/tensorflow.WorkerService/GetStatus"
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels to one address share a connection, and the delay after it has failed.
    ("grpc.use_local_subchannel_pool", 1),
]


def watch(address: str, timeout: float, connections: list[socket.socket]) -> None:
    """Checks a worker, and ends the connections to it when it stops answering."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        ask = channel.unary_unary(STATUS)
        heard, misses = time.monotonic(), 0
        while True:
            try:
                ask(b"", timeout=timeout / 10)
                heard, misses = time.monotonic(), 0
            except grpc.RpcError:
                misses += 1
            if misses >= 3 and time.monotonic() - heard > 0.8 * timeout:
                end(connections)
            time.sleep(timeout / 10)


def end(connections: list[socket.socket]) -> None:
    """Shuts connections down: calls that wait for them fail at once."""
    while connections:
        with connections.pop() as one:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # ended by itself


def main() -> None:
    """Watches the workers until the process that started this one closes the socket."""
    parent, timeout, addresses = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    connections: list[list[socket.socket]] = [[] for _ in addresses]
    for address, own in zip(addresses, connections):
        threading.Thread(target=watch, args=(address, timeout, own), daemon=True).start()
    with socket.socket(fileno=parent) as source:
        while True:
            number, handed, _, _ = socket.recv_fds(source, 1, 1)
            if not number:
                os._exit(0)
            own = connections[number[0]]
            own += [socket.socket(fileno=one) for one in handed]
            del own[:-100]  # the latest: others have ended long ago


if __name__ == "__main__":
    main()
