"""Works on the sockets that TensorFlow opens in this process, where it has no options.

TensorFlow's server listens on every address of its machine, whatever address it gets
(https://github.com/tensorflow/tensorflow/issues/2925): a filter on the listening socket closes the
others. A call to a frozen process waits forever: shutting its connections down makes it fail.
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
from collections.abc import Iterator

# Classic BPF, as in Linux's filter.h: load a byte or a word, mask, compare, give a verdict.
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # where offsets count from the packet's IP header
_SO_ATTACH_FILTER = 26
# Linux's `struct tcp_info`: the bytes acknowledged come just before the bytes received.
_BYTES_RECEIVED = 128
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
    for one in _own_sockets():
        is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and one.getsockname()[1] == port:
            _attach(one, ip)
    for one, own, _ in _connections():
        if own[1] == port and own[0] != ip:
            _end(one)


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


def end_connections(ip: str, port: int) -> None:
    """Shuts this process's connections to an address down: waiting calls fail at once."""
    for one, _, peer in _connections():
        if peer == (ip, port):
            _end(one)


def bytes_moved(ip: str, port: int, own_port: int) -> int:
    """The bytes received and acknowledged on all connections with a worker.

    The worker connects to `own_port`. The result is 0 on systems other than Linux.
    """
    moved = 0
    for one, own, peer in _connections() if sys.platform == "linux" else ():
        if peer == (ip, port) or own[1] == own_port:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
            moved += sum(struct.unpack_from("QQ", info, _BYTES_RECEIVED - 8))
    return moved


def hand_over(target: socket.socket, number: int, ip: str, port: int) -> None:
    """Sends copies of the connections to an address through a socket, with a number."""
    # Not `socket.dup`, which makes the connection itself blocking.
    copies = [os.dup(one.fileno()) for one, _, peer in _connections() if peer == (ip, port)]
    with contextlib.suppress(OSError):  # the other process has ended, or is busy
        socket.send_fds(target, [number.to_bytes(2, "big")], copies)
    for copy in copies:
        os.close(copy)


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


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have ended by itself
        connected.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[socket.socket, _Place, _Place]]:
    """This process's TCP connections: copies of the sockets, their own ends and their peers."""
    for one in _own_sockets():
        with contextlib.suppress(OSError):  # not connected
            # An IPv4 address has a prefix on a socket that serves IPv6 too.
            own, peer = (
                (str(end[0]).removeprefix("::ffff:"), int(end[1]))
                for end in (one.getsockname(), one.getpeername())
            )
            yield one, own, peer


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
