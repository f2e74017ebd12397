"""join: check the request, hand it over to the engine."""

from __future__ import annotations

from keras_multigpu import engines
from keras_multigpu.cluster.addresses import find_address


def join(
    coordinator: str, num_processes: int, process_id: int, *, timeout: float = 30.0
) -> tuple[str, ...]:
    """Joins this process to others, one per host, whose devices one model then uses (JAX).

    Every host runs the same script, in which this comes right after the imports. After it,
    `list_devices()` names the devices of all processes, and `make_parallel(model)` uses them all.
    Every process makes the same calls of the parallel model with the same data, and takes its
    rows of each batch; process 0 alone writes files. Where the processes' random numbers differ,
    all are given a seed of process 0's; a seed that was set before in all of them stays. A process
    without a GPU has two CPU devices at least: as `use_virtual_devices` makes them.

    Whoever reaches the coordinator's port can join: JAX asks for no password and encrypts
    nothing. Use a private network.

    Args:
        coordinator: an address of process 0's host, `"host:port"`, with a port that is free there.
        num_processes: how many processes there are.
        process_id: this one's number, from 0 to `num_processes - 1`.
        timeout: after how many seconds of silence, 3 or more, another process is given up: here,
            and at any later time in `fit`, `evaluate` or `predict`.

    Returns:
        What to call each process: its host, its number and its process id there.

    Raises:
        ValueError: if an argument is not of the form that it must have.
        ClusterError: if the processes don't come together in time, or have other versions. It
            has the attributes `host`, `problem` and `cure`.
        RuntimeError: on a Keras backend other than JAX, or if JAX has started already.

    Example:
        >>> join("gpu7:1234", num_processes=2, process_id=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: `process_id` must be an integer from 0 to `num_processes` - 1, ...
    """
    counts = (num_processes, process_id)
    are_integers = all(isinstance(n, int) and not isinstance(n, bool) for n in counts)
    if not are_integers or not 0 <= process_id < num_processes:
        raise ValueError(
            "`process_id` must be an integer from 0 to `num_processes` - 1, another one in each "
            f"process. Received: num_processes={num_processes!r}, process_id={process_id!r}."
        )
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 3 <= timeout < float("inf"):
        raise ValueError(
            "`timeout` must be a number of seconds, 3 or more: a process that is busy answers "
            f"late. Received: timeout={timeout!r}."
        )
    address = find_address("coordinator", coordinator)
    return engines.current().join(address, num_processes, process_id, float(timeout))
