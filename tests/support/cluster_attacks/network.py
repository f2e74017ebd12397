"""What happens on a network: garbage, a slow link, a connection that goes silent."""

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
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


def drop_all(connection):
    """Has the kernel drop all packets that come for a connection, before it acknowledges them."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # "return 0" in BPF
    program = struct.pack("HL", 1, ctypes.addressof(code))
    connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


class Proxy:
    """Passes connections on to a port of this machine, late, slowly, or not at all.

    It is a process of its own: TensorFlow connects while it holds Python's lock, and no thread of
    its process could pass anything on meanwhile.

    Args:
        target: the port to pass connections on to.
        delay: the seconds by which all bytes come late.
        rate: the bytes in a second that one connection passes on at most.
    """

    def __init__(self, target, delay=0.0, rate=1e9):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, (target, delay, rate))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.port = int(self._process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def silence(self):
        """Drops what comes on the connection that has passed most, which carries tensors.

        Nothing is acknowledged, as behind a firewall that has forgotten the connection.
        """
        self._process.stdin.write(b"silence\n")
        self._process.stdin.flush()

    def close(self):
        """Ends all connections."""
        self._process.kill()
        self._process.communicate()


def main(target, delay, rate):
    """Passes connections on, and reads on stdin when one is to go silent."""
    passed, pairs = [], []

    def move(number, source, goal):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay + len(data) / rate)
                goal.sendall(data)
                passed[number] += len(data)
            goal.shutdown(socket.SHUT_WR)

    def obey():
        for _ in sys.stdin:
            for end in pairs[max(range(len(passed)), key=passed.__getitem__)]:
                drop_all(end)

    threading.Thread(target=obey, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            one = server.accept()[0]
            try:
                other = socket.create_connection(("127.0.0.1", target))
            except OSError:  # nobody listens there yet
                one.close()
                continue
            pairs.append((one, other))
            passed.append(0)
            for ends in ((one, other), (other, one)):
                arguments = (len(passed) - 1, *ends)
                threading.Thread(target=move, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
