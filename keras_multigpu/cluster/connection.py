"""connect and disconnect: check the request, hand it over to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from keras_multigpu import engines
from keras_multigpu.cluster.addresses import find_address
from keras_multigpu.engines import Address


def connect(
    workers: Sequence[str], *, timeout: float = 30.0, local: str | None = None
) -> tuple[str, ...]:
    """Connects this process to machines that run `python -m keras_multigpu serve` (TensorFlow).

    The first time it must be called before TensorFlow starts, that is before the first tensor or
    model. Workers that don't answer yet are waited for. Called again with the same workers, it
    gives the same devices; with others, it lets go of those that are not named. Models go on as
    long as all their devices are there, also when a worker was lost or started again in between.
    Weights that were on a worker (modes `"model"`, and `"tower"` with independent replicas) are
    lost when it is let go of.

    Workers also reach each other by these addresses, and this process by `local`. TensorFlow
    asks for no password and encrypts nothing: use a private network, or tunnels.

    Args:
        workers: their addresses, `"host:port"`; 1 or more.
        timeout: after how many seconds of silence, 3 or more, a worker is given up: here, and at
            any later time in `fit`, `evaluate` or `predict`.
        local: the address by which the workers reach this process, with a port that is
            free; `None` for that of the network interface by which they are reached, and any port.

    Returns:
        The names of the workers' devices, `"host:port/gpu:0"`: of each its GPUs, or its CPU
        devices where it has no GPU.

    Raises:
        ValueError: if an argument is not of the form that it must have.
        ClusterError: if a worker does not answer in time, is none, has another version of
            TensorFlow, or can't reach the others. It has the attributes `host`, `problem`, `cure`.
        RuntimeError: if TensorFlow has started before the first call, or on another backend.

    Example:
        >>> connect(["gpu7"])
        Traceback (most recent call last):
        ValueError: `workers` must have the form 'HOST:PORT': a host's name or IPv4 address, and a \
port from 1 to 65535. Received: 'gpu7'. Write 'gpu7:2222', say.
    """
    if isinstance(workers, str) or not isinstance(workers, Sequence) or not workers:
        raise ValueError(
            "`workers` must be a list of addresses, 'HOST:PORT', with one at least. "
            f"Received: workers={workers!r}. Give those that `python -m keras_multigpu serve` "
            "was started with."
        )
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 3 <= timeout < float("inf"):
        raise ValueError(
            "`timeout` must be a number of seconds, 3 or more: a worker that is busy answers late. "
            f"Received: timeout={timeout!r}."
        )
    addresses = [find_address("workers", worker) for worker in workers]
    _check_different(addresses)
    here = None if local is None else find_address("local", local)
    return engines.current().remote.connect(addresses, here, float(timeout))


def disconnect() -> None:
    """Lets go of the workers; they can be used by others, and by this process again.

    Models on this machine's devices go on. Without a connection it does nothing.

    Raises:
        RuntimeError: on a Keras backend other than TensorFlow.

    Example:
        >>> import keras
        >>> if keras.backend.backend() == "tensorflow":
        ...     disconnect()  # there is no connection: nothing happens
    """
    engines.current().remote.disconnect()


def _check_different(addresses: Sequence[Address]) -> None:
    names: dict[str, str] = {}
    for address in addresses:
        if address.numeric in names:
            raise ValueError(
                "`workers` must name each address once. Received: "
                f"{names[address.numeric]!r} and {address.name!r}, which are the same. "
                "Start a second worker on another port."
            )
        names[address.numeric] = address.name
