"""A process that ends the connections to lost workers, and what hands them to it.

A call to a frozen worker waits for ever, because its machine keeps the connection. TensorFlow sends
every new function to the workers while it holds Python's lock, when no thread can run: so a
separate process watches. It imports neither TensorFlow nor the package. Its arguments are the
number of a socket, the seconds of silence that are allowed, and the workers' addresses. The
connections come through the socket: a worker's number in two bytes, and with it the file
descriptors of all connections to it. It answers with the numbers of lost workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import grpc

STATUS = "/tensorflow.WorkerService/GetStatus"
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels to one address share a connection, and the delay after it has failed.
    ("grpc.use_local_subchannel_pool", 1),
]


class Watchdog:
    """The process that watches workers at some addresses.

    Args:
        addresses: the workers, `"ip:port"`.
        silence: seconds without an answer after which a worker is lost.
    """

    def __init__(self, addresses: Sequence[str], silence: float):
        self._lost: set[int] = set()
        self._socket, its = socket.socketpair()
        self._socket.setblocking(False)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno()), str(silence), *addresses],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process that trains
            )

    def hand_over(self, number: int, connections: Sequence[int]) -> None:
        """Passes the file descriptors of a worker's connections to the process."""
        with contextlib.suppress(OSError):  # it has ended, or is busy
            socket.send_fds(self._socket, [number.to_bytes(2, "big")], connections)

    def lost(self) -> set[int]:
        """The numbers of the workers that it has found lost."""
        with contextlib.suppress(OSError):  # there is nothing new
            while told := self._socket.recv(2):
                self._lost.add(int.from_bytes(told, "big"))
        return self._lost

    def stop(self) -> None:
        """Ends the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def watch(
    number: int, address: str, silence: float, connections: list[socket.socket], told: socket.socket
) -> None:
    """Checks a worker, and ends the connections to it while it does not answer."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        ask = channel.unary_unary(STATUS)
        heard, misses, pause, is_told = time.monotonic(), 0, silence / 8, False
        while True:
            try:
                ask(b"", timeout=pause)
                heard, misses = time.monotonic(), 0
            except grpc.RpcError:
                misses += 1
            # Three misses, because the first calls time out if this machine was suspended.
            if misses >= 3 and time.monotonic() - heard > silence:
                if not is_told:
                    told.sendall(number.to_bytes(2, "big"))
                is_told = True
                for one in list(connections):
                    with contextlib.suppress(OSError):  # it has ended by itself
                        one.shutdown(socket.SHUT_RDWR)
            time.sleep(pause)


def main() -> None:
    """Watches the workers until the process that started this one closes the socket."""
    parent, silence, addresses = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    connections: list[list[socket.socket]] = [[] for _ in addresses]
    with socket.socket(fileno=parent) as source:
        for number, address in enumerate(addresses):
            arguments = (number, address, silence, connections[number], source)
            threading.Thread(target=watch, args=arguments, daemon=True).start()
        while True:
            told, handed, _, _ = socket.recv_fds(source, 2, 250)
            if not told:
                os._exit(0)
            latest = [socket.socket(fileno=one) for one in handed]
            connections[int.from_bytes(told, "big")][:] = latest  # closes the copies before


if __name__ == "__main__":
    main()
