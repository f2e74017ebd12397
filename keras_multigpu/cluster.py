"""Devices of other machines.

With `join` every machine runs the same script, and the processes train one model together. On
TensorFlow one process, a notebook for example, can also drive all machines: the others run
`python -m keras_multigpu serve`, and `connect` returns the names of their devices, for
`make_parallel(model, devices=...)`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from keras_multigpu import engines
from keras_multigpu.arguments import as_integer, check_choice, finite_number, positive_integer
from keras_multigpu.engines import Address, ClusterError
from keras_multigpu.launched import find_place, split_address

__all__ = ["ClusterError", "connect", "disconnect", "join", "serve"]


def __dir__() -> list[str]:
    return sorted(__all__)


_NO_PASSWORD = (
    "TensorFlow's server asks for no password and encrypts nothing: whoever reaches it can run "
    "computations with the rights of this process, and read and write its files."
)


def connect(
    workers: Sequence[str], *, timeout: float = 30.0, local: str | None = None
) -> tuple[str, ...]:
    """Connects this process to machines that run `python -m keras_multigpu serve` (TensorFlow).

    The first call must come before TensorFlow starts, that is before the first tensor or model.
    It waits for workers that don't answer yet. A second call with the same workers returns the
    same devices; with other workers, it disconnects those that are not named. A model goes on
    working while all its devices are connected, also if a worker was lost or restarted in between.
    Weights that are stored on a worker (modes `"model"`, and `"tower"` with independent replicas)
    are lost when it is disconnected.

    The workers also connect to each other at these addresses, and to this process at `local`.
    TensorFlow asks for no password and encrypts nothing: use a private network, or tunnels.

    Args:
        workers: one or more addresses, `"host:port"`: the host's name, its IPv4 address, or its
            IPv6 address in brackets.
        timeout: seconds of silence, 3 or more, after which a worker counts as lost: here, and
            later in `fit`, `evaluate` or `predict`.
        local: the address at which the workers reach this process, with a free port; `None` for
            that of the network interface that leads to them, and any port.

    Returns:
        The names of the workers' devices, `"host:port/gpu:0"`: each worker's GPUs, or its CPU
        devices if it has no GPU.

    Raises:
        ValueError: if an argument has the wrong form.
        ClusterError: if a worker does not answer in time, is another program, has another version
            of TensorFlow, or can't reach the others. It has `host`, `problem` and `cure`.
        RuntimeError: if TensorFlow has started before the first call, or on another backend.

    Example:
        >>> connect(["gpu7"])
        Traceback (most recent call last):
        ValueError: `workers` must have the form 'HOST:PORT', with a port from 1 to 65535. \
Received: 'gpu7'. Write 'gpu7:2222', '10.0.0.7:2222' or '[fd00::7]:2222', say.
    """
    if isinstance(workers, str) or not isinstance(workers, Sequence) or not workers:
        raise ValueError(
            "`workers` must be a list of one or more addresses, 'HOST:PORT'. "
            f"Received: workers={workers!r}. Give those with which `python -m keras_multigpu "
            "serve` was started."
        )
    seconds = _check_timeout(timeout)
    addresses = [_find_address("workers", worker) for worker in workers]
    _check_different(addresses)
    here = None if local is None else _find_address("local", local)
    return engines.current().remote.connect(addresses, here, seconds)


def disconnect() -> None:
    """Disconnects all workers; other processes can then use them, and this one again.

    Models on this machine's devices go on working. Without a connection it does nothing.

    Raises:
        RuntimeError: on a Keras backend other than TensorFlow.

    Example:
        >>> import keras
        >>> if keras.backend.backend() == "tensorflow":
        ...     disconnect()  # there is no connection: nothing happens
    """
    engines.current().remote.disconnect()


def serve(bind: str = "127.0.0.1:2222", *, virtual_devices: int = 1) -> None:
    """Serves this machine's devices to a process that calls `connect`, until it is interrupted.

    TensorFlow's server asks for no password and encrypts nothing: whoever reaches it can run
    computations with the rights of this process, and read and write its files. By default only
    processes of this machine reach it.

    Args:
        bind: `"host:port"`, an address of this machine: the server is reached at this address
            only. `"0.0.0.0:port"` stands for all its addresses, IPv6 included.
        virtual_devices: into how many CPU devices to split the processor.

    Raises:
        ValueError: if an argument has the wrong form.
        ClusterError: if the address is not one of this machine's, the port is taken, or this
            system can't close the server's port to other addresses.
        RuntimeError: on a Keras backend other than TensorFlow.

    Example:
        >>> serve("2222")
        Traceback (most recent call last):
        ValueError: `bind` must have the form 'HOST:PORT', with a port from 1 to 65535. \
Received: '2222'. Write 'gpu7:2222', '10.0.0.7:2222' or '[fd00::7]:2222', say.
    """
    virtual_devices = positive_integer("virtual_devices", virtual_devices, "Give 1 or more.")
    address = _find_address("bind", bind)
    devices = engines.current().remote.serve(address, virtual_devices)
    print(_who_reaches(address))
    print(f"Serving {', '.join(devices)} at {address.name}. Ctrl-C ends it.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 30.0,
    data: str = "same",
) -> tuple[str, ...]:
    """Joins this process to others, one per host; one model then uses all their devices.

    Every host runs the same script, which calls this right after the imports. Afterwards
    `list_devices()` names the devices of all processes, and `make_parallel(model)` uses them all.
    Every process makes the same calls of the parallel model, and computes some rows of each batch;
    only process 0 writes files. By default all give the same data. With `data="parts"` each gives
    different rows, and a step's batch is the rows of all processes, in the order of their numbers:
    losses, metrics, layers and a `train_step` of yours see that whole batch.

    If the processes' random numbers differ, all get a seed from process 0; a seed that all of them
    have set stays. On JAX a process without a GPU has at least two CPU devices, as
    `use_virtual_devices` makes them.

    Whoever reaches the coordinator's port can join: neither TensorFlow nor JAX asks for a password
    or encrypts anything. On TensorFlow each process also has a server, at a port that the system
    chooses; whoever reaches it can run computations with the rights of this process, and read and
    write its files. Use a private network.

    What is not given is read from the environment: from `TF_CONFIG`, else from Slurm's variables in
    a process that `srun` has started (process 0 is on the first node; the port follows from the
    job's number).

    Args:
        coordinator: an address of process 0's host, `"host:port"`, with a port that is free there.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0 to `num_processes - 1`.
        timeout: seconds of silence, 3 or more, after which another process counts as lost: here,
            and later in `fit`, `evaluate` or `predict`.
        data: `"same"`, or `"parts"`: what `fit`, `evaluate`, `predict` and the calls for one batch
            get in a process is its part of each batch, of any number of rows. All processes must
            have the same number of batches. `predict` returns the outputs of the process's rows.

    Returns:
        A description of each process: its host, its number and its process id there.

    Raises:
        ValueError: if an argument has the wrong form, or is neither given nor in the environment.
        ClusterError: if not all processes join in time, or if they run different versions. It
            has `host`, `problem` and `cure`.
        RuntimeError: if TensorFlow or JAX has started already.

    Example:
        >>> join("gpu7:1234", num_processes=2, process_id=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: `process_id` must be an integer from 0 to `num_processes` - 1, ...
    """
    coordinator, num_processes, process_id = _complete(coordinator, num_processes, process_id)
    num_processes = positive_integer("num_processes", num_processes)
    number = as_integer(process_id)
    if number is None or not 0 <= number < num_processes:
        raise ValueError(
            "`process_id` must be an integer from 0 to `num_processes` - 1, a different one in "
            f"each process. Received: num_processes={num_processes!r}, process_id={process_id!r}."
        )
    seconds = _check_timeout(timeout)
    check_choice("data", data, "same", "parts")
    address = _find_address("coordinator", coordinator)
    return engines.current().join(address, num_processes, number, seconds, data)


def _complete(*given: Any) -> Sequence[Any]:
    """The arguments of `join`, those that are not given from the environment."""
    if None not in given:
        return given
    place = find_place(os.environ)
    if place is None:
        raise ValueError(
            "`coordinator`, `num_processes` and `process_id` must be given, or be in the "
            "environment. Received: coordinator={!r}, num_processes={!r}, process_id={!r}, with "
            "neither `TF_CONFIG` nor Slurm's variables in it. Give all three, or start the "
            "processes with `srun`.".format(*given)
        )
    return [told if own is None else own for own, told in zip(given, place)]


def _check_timeout(timeout: float) -> float:
    expected = "a number of seconds, 3 or more: a busy machine answers late"
    return float(finite_number("timeout", timeout, expected, lambda one: one >= 3))


def _find_address(argument: str, value: object) -> Address:
    """The address that `"host:port"` stands for; `argument` is named in the error."""
    name, host, port = split_address(argument, value)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            name,
            f"This machine knows no address of {host!r} ({error.strerror}).",
            "Check the spelling, or give the host's IP address.",
        ) from error
    best = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv4 if the host has both
    return Address(name, str(best[4][0]).removeprefix("::ffff:"), port)


def _check_different(addresses: Sequence[Address]) -> None:
    first: dict[str, Address] = {}
    for address in addresses:
        other = first.setdefault(address.numeric, address)
        if other is not address:
            raise ValueError(
                f"`workers` must name each address once. Received: {other.name!r} and "
                f"{address.name!r}, which are the same. Start a second worker on another port."
            )


def _who_reaches(address: Address) -> str:
    """Who can use the server, and what that means."""
    ip = ipaddress.ip_address(address.ip)
    if ip.is_loopback:
        return (
            "Only processes of this machine reach it. From another machine, use an SSH tunnel, or "
            "bind to an address of a private network."
        )
    where = "any address of this machine" if ip.is_unspecified else address.ip
    return (
        f"Every machine that reaches {where} can use it. {_NO_PASSWORD} Let only your own "
        f"machines reach port {address.port}: use a private network, or a firewall."
    )
