"""What happens on a network: garbage, a slow link, a connection that goes silent."""

import contextlib
import os
import socket
import threading
import time

_KINDS = (b"", b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def send_garbage(port, seconds, host="127.0.0.1"):
    """Opens connections to a port and sends bytes that mean nothing; returns how many it made."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for start in _KINDS:
            with contextlib.suppress(OSError), socket.create_connection((host, port), 1) as one:
                one.sendall(start + os.urandom(2000))
                count += 1
        time.sleep(0.02)
    return count


class Proxy:
    """Passes connections on to a port of this machine, late, slowly, or not at all.

    Args:
        target: the port to pass connections on to.
        delay: the seconds by which all bytes come late.
        rate: the bytes in a second that one connection passes on at most.
    """

    def __init__(self, target, delay=0.0, rate=1e9):
        self.delay, self.rate, self._target = delay, rate, target
        self._passed, self._silent = [], set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self):
        """Passes on nothing more of the connection that has passed most: it carries tensors."""
        self._silent.add(max(range(len(self._passed)), key=self._passed.__getitem__))

    def close(self):
        """Takes no connection any more."""
        self._server.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one = self._server.accept()[0]
                other = socket.create_connection(("127.0.0.1", self._target))
                self._passed.append(0)
                for ends in ((one, other), (other, one)):
                    arguments = (len(self._passed) - 1, *ends)
                    threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(self, number, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay + len(data) / self.rate)
                while number in self._silent:
                    time.sleep(0.05)
                target.sendall(data)
                self._passed[number] += len(data)
            target.shutdown(socket.SHUT_WR)
