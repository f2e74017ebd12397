"""Works on the sockets that TensorFlow opens in this process, where it has no options.

TensorFlow's server listens on every address of its machine, whatever address it gets
(https://github.com/tensorflow/tensorflow/issues/2925): a filter on the listening socket closes the
others. It waits for ever for a connection that a firewall has dropped: the kernel can notice that.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

# Classic BPF, as in Linux's filter.h: load a byte or a word, mask, compare, give a verdict.
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # where offsets count from the packet's IP header
_SO_ATTACH_FILTER = 26
_Place = tuple[str, int]  # an IP address and a port


def listen_only_at(ip: str, port: int) -> None:
    """Makes a port on which this process listens reachable at one address only.

    The kernel drops packets to other addresses. Earlier connections are shut down.

    Raises:
        OSError: if this system has no such filters.
    """
    if ipaddress.ip_address(ip).is_unspecified:
        return
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no filters for sockets that listen")
    with _own_sockets() as found:
        for one in found:
            is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and one.getsockname()[1] == port:
                _attach(one, ip)
    with connections(at=port) as found:
        end([one for one in found if _place(one.getsockname())[0] != ip])


def close_to_others(ip: str, port: int, users: str, stacklevel: int) -> None:
    """Closes a port of this process, except at the address that its `users` reach.

    Warns:
        UserWarning: if this system has no such filters.
    """
    try:
        listen_only_at(ip, port)
    except OSError as error:
        warnings.warn(
            f"TensorFlow listens on port {port} of all addresses of this machine, and this "
            f"system can't close it to others ({error}): whoever reaches the port can run "
            f"computations in this process. Let a firewall close it to all but the {users}.",
            stacklevel=stacklevel,
        )


@contextlib.contextmanager
def connections(to: _Place | None = None, at: int | None = None) -> Iterator[list[socket.socket]]:
    """Scope with copies of this process's connections, or of those `to` a place or `at` a port."""

    def is_wanted(one: socket.socket) -> bool:
        with contextlib.suppress(OSError):  # not connected
            own, peer = _place(one.getsockname()), _place(one.getpeername())
            return to in (None, peer) and at in (None, own[1])
        return False

    with _own_sockets() as found:
        yield list(filter(is_wanted, found))


def end(connections: Iterable[socket.socket]) -> None:
    """Shuts connections down: calls that wait for the other side fail at once."""
    for one in connections:
        with contextlib.suppress(OSError):  # it may have ended by itself
            one.shutdown(socket.SHUT_RDWR)


def limit_silence(connections: Iterable[socket.socket], seconds: float) -> None:
    """Has the kernel end connections whose other side acknowledges nothing for some seconds.

    It asks for a sign of life on those that rest. Only Linux does so with data on their way.
    """
    pause = max(1, round(seconds / 4))
    for one in connections:
        with contextlib.suppress(OSError):  # it may have ended by itself
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", pause),
                ("TCP_KEEPINTVL", pause),
                ("TCP_KEEPCNT", 4),
                ("TCP_USER_TIMEOUT", round(1000 * seconds)),
            ):
                if hasattr(socket, name):
                    one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _attach(listening: socket.socket, ip: str) -> None:
    """Attaches a filter that accepts packets to one IP address only."""
    address = ipaddress.ip_address(ip)
    version, target = (0x40, 16) if address.version == 4 else (0x60, 24)  # and where its bytes are
    program = [(_LOAD_BYTE, _NETWORK_HEADER), (_AND, 0xF0), (_JUMP_IF_EQUAL, version)]
    for place, (word,) in enumerate(struct.iter_unpack("!I", address.packed)):
        program += [(_LOAD_WORD, _NETWORK_HEADER + target + 4 * place), (_JUMP_IF_EQUAL, word)]
    program += [(_RETURN, 0xFFFFFFFF), (_RETURN, 0)]
    lines = [
        # If it is not equal, jump to the last line, which drops the packet.
        struct.pack("HBBI", code, 0, len(program) - 2 - at if code == _JUMP_IF_EQUAL else 0, value)
        for at, (code, value) in enumerate(program)
    ]
    code = ctypes.create_string_buffer(b"".join(lines))
    pointer = struct.pack("HL", len(lines), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _place(end: Any) -> _Place:
    """An end of a connection; an IPv4 address has a prefix on a socket that serves IPv6 too."""
    return str(end[0]).removeprefix("::ffff:"), int(end[1])


@contextlib.contextmanager
def _own_sockets() -> Iterator[list[socket.socket]]:
    """Scope with copies of this process's TCP sockets."""
    with contextlib.ExitStack() as copies:
        found = []
        for number in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # closed by now
                if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                    # Not `socket.dup`, which makes the connection itself blocking.
                    one = copies.enter_context(socket.socket(fileno=os.dup(int(number))))
                    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                    found += [one] if is_tcp and one.type == socket.SOCK_STREAM else []
        yield found
