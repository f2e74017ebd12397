"""Works on the sockets that TensorFlow opens in this process, where it has no options.

TensorFlow's server listens on every address of its machine, whatever address it gets
(https://github.com/tensorflow/tensorflow/issues/2925): a filter on the listening socket closes the
others. A call to a frozen process waits forever: shutting its connections down makes it fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

# Classic BPF, as in Linux's filter.h: load a byte or a word, mask, compare, give a verdict.
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # where offsets count from the packet's IP header
_SO_ATTACH_FILTER = 26
_ANY = "0.0.0.0"
# Linux's `struct tcp_info`: the bytes acknowledged come just before the bytes received.
_BYTES_RECEIVED = 128


def listen_only_at(ip: str, port: int) -> None:
    """Makes a port on which this process listens reachable at one address only.

    The kernel drops packets to other addresses. Earlier connections are shut down.

    Raises:
        OSError: if this system has no such filters.
    """
    if ip == _ANY:
        return
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no filters for sockets that listen")
    for one in _own_sockets():
        if one.getsockname()[1] == port and _listens(one):
            _attach(one, ip)
    for one in _own_sockets():
        own = one.getsockname()
        if own[1] == port and _plain(own[0]) != ip and not _listens(one):
            _end(one)


def end_connections(ip: str, port: int) -> None:
    """Shuts this process's connections to an address down: waiting calls fail at once."""
    for one in _own_sockets():
        with contextlib.suppress(OSError):  # not connected
            peer = one.getpeername()
            if (_plain(peer[0]), peer[1]) == (ip, port):
                _end(one)


def bytes_moved(ip: str, port: int, own_port: int) -> int:
    """The bytes received and acknowledged on all connections with a worker.

    The worker connects to `own_port`. The result is 0 on systems other than Linux.
    """
    if sys.platform != "linux":
        return 0
    moved = 0
    for one in _own_sockets():
        with contextlib.suppress(OSError):  # not connected
            peer = one.getpeername()
            if (_plain(peer[0]), peer[1]) == (ip, port) or one.getsockname()[1] == own_port:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
                moved += sum(struct.unpack_from("QQ", info, _BYTES_RECEIVED - 8))
    return moved


class Handed:
    """Passes connections to another process through a socket, each once."""

    def __init__(self, target: socket.socket):
        self._target = target
        self._known: set[tuple[object, ...]] = set()

    def give(self, number: int, ip: str, port: int) -> None:
        """Passes all new connections to an address, which the other process knows by a number."""
        for one in _own_sockets():
            with contextlib.suppress(OSError):  # not connected, or the other process has ended
                peer = one.getpeername()
                key = (number, one.getsockname(), os.fstat(one.fileno()).st_ino)
                if (_plain(peer[0]), peer[1]) == (ip, port) and key not in self._known:
                    socket.send_fds(self._target, [bytes([number])], [one.fileno()])
                    self._known.add(key)


def _attach(listening: socket.socket, ip: str) -> None:
    """Attaches a filter that accepts packets to one IPv4 address only."""
    (address,) = struct.unpack("!I", socket.inet_aton(ip))
    program = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, 3, 0x40),  # IPv4
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 16),
        (_JUMP_IF_EQUAL, 0, 1, address),  # to this address
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    pointer = struct.pack("HL", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have ended by itself
        connected.shutdown(socket.SHUT_RDWR)


def _own_sockets() -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets, each closed after its turn."""
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed by now
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and one.type == socket.SOCK_STREAM:
                    yield one


def _plain(ip: str) -> str:
    """An IPv4 address without its IPv6 prefix."""
    return ip.removeprefix("::ffff:")
