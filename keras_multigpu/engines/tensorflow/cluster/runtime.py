"""TensorFlow's runtime in this process: its list of machines, its server, and a port for it."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import socket
from collections.abc import Iterator, Sequence

import tensorflow as tf

# If the list of machines has changed, `tf.config.experimental_connect_to_cluster` recreates this
# process's devices, and later assignments to variables are lost. For an unchanged list it calls
# this function, which accepts other lists too, and keeps the devices. For `abort_collectives` there
# is no public name either: without it, an operation waits for ever for a frozen process.
from tensorflow.python.eager import context  # noqa: TID251

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address, cannot_listen, check_free
from keras_multigpu.engines.tensorflow.cluster.sockets import listen_only_at
from keras_multigpu.engines.tensorflow.names import LOCAL_JOB, REMOTE_JOB

# Read when the runtime starts. With separate calls, TensorFlow raises an error if one does not
# arrive; in a stream of calls, it would wait for it.
_STREAMS = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"
# Read at each call to a worker. Otherwise, calls wait for ever while a connection can't be made.
_FAIL_FAST = "GRPC_FAIL_FAST"


def has_started() -> bool:
    """Whether the runtime has created its devices, which may have variables."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def start(local: Address) -> None:
    """Starts the runtime with a server at `local`, and without other machines."""
    os.environ[_STREAMS] = "False"
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({LOCAL_JOB: [local.numeric]}))
    tf.config.list_logical_devices()


def update(workers: dict[int, str]) -> None:
    """Changes the list of other machines, and keeps the devices of this process."""
    server = copy.deepcopy(context.get_server_def())
    kept = [job for job in server.cluster.job if job.name == LOCAL_JOB]
    del server.cluster.job[:]
    server.cluster.job.extend(kept)
    if workers:
        server.cluster.job.add(name=REMOTE_JOB, tasks=workers)
    with environment(_FAIL_FAST, "true"):
        context.update_server_def(server)


def abort_collectives() -> None:
    """Ends the collective operations of this process with an error, those to come too."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, "a process is lost")


def version_job() -> str:
    """The name of a worker's job, which contains its version of TensorFlow."""
    return f"{REMOTE_JOB}_tensorflow_{re.sub(r'[^0-9A-Za-z]', '_', tf.__version__)}"


def start_server(address: Address, virtual_devices: int) -> None:
    """Starts TensorFlow's server in this process, reachable at one address only.

    Raises:
        ClusterError: if the address or the port can't be used, or can't be closed to others.
    """
    check_free(address)  # TensorFlow takes the port on all addresses
    cluster = tf.train.ClusterSpec({version_job(): {0: address.numeric}})
    settings = tf.compat.v1.ConfigProto(device_count={"CPU": virtual_devices})
    settings.gpu_options.allow_growth = True
    try:
        tf.distribute.Server(cluster, job_name=version_job(), task_index=0, config=settings)
    except tf.errors.OpError as error:
        raise cannot_listen(address, "TensorFlow's server did not start") from error
    try:
        listen_only_at(address.ip, address.port)
    except OSError as error:
        raise ClusterError(
            address.name,
            "TensorFlow's server listens on all addresses of a machine, and this system can't "
            f"close it to the others ({error}).",
            f"Let a firewall close port {address.port}, and bind to '0.0.0.0:{address.port}'; or "
            "serve on Linux.",
        ) from error


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Scope in which a variable of the environment has a value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def kept_port(ip: str) -> Iterator[tuple[Address, socket.socket]]:
    """Scope with a free port, which no other process of this machine gets, and what listens there.

    It listens so that others can try whether they reach it. When it is closed, TensorFlow's server
    may take its place.
    """
    family = Address(ip, ip, 0).family
    with _bound(family, "", 0) as kept:
        address = Address(ip, ip, int(kept.getsockname()[1]))
        with _bound(family, ip, address.port) as listening:
            listening.listen()
            yield address, listening


def _bound(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    """A socket at a port, free if it is 0, that shares it with others of this user."""
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((ip, port))
    return one


def find_unreached(addresses: Sequence[str], seconds: float) -> dict[int, str]:
    """The first of some addresses, `"ip:port"`, that does not answer in time, by its number."""
    for number, address in enumerate(addresses):
        ip, _, port = address.rpartition(":")
        try:
            socket.create_connection((ip.strip("[]"), int(port)), seconds).close()
        except OSError:
            return {number: address}
    return {}
