"""A program that ends another process's connections to lost workers.

TensorFlow sends every new function to the workers while it holds Python's lock. If a worker freezes
then, no thread of that process can run, so this is a separate process. It imports neither
TensorFlow nor the package. Its arguments are the number of a socket, the seconds of silence that
are allowed, and the workers' addresses. The connections arrive through the socket: a worker's
number in two bytes, and with it the file descriptors of all connections to it.
"""

from __future__ import annotations

import contextlib
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
                for one in list(connections):
                    with contextlib.suppress(OSError):  # it has ended by itself
                        one.shutdown(socket.SHUT_RDWR)
            time.sleep(timeout / 10)


def main() -> None:
    """Watches the workers until the process that started this one closes the socket."""
    parent, timeout, addresses = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    connections: list[list[socket.socket]] = [[] for _ in addresses]
    for address, own in zip(addresses, connections):
        threading.Thread(target=watch, args=(address, timeout, own), daemon=True).start()
    with socket.socket(fileno=parent) as source:
        while True:
            number, handed, _, _ = socket.recv_fds(source, 2, 250)
            if not number:
                os._exit(0)
            latest = [socket.socket(fileno=one) for one in handed]
            connections[int.from_bytes(number, "big")][:] = latest  # closes the copies before


if __name__ == "__main__":
    main()
