"""TensorFlow's runtime in this process: the machines that it knows, and its server."""

from __future__ import annotations

import copy
import os
import re
import socket

import tensorflow as tf

# `tf.config.experimental_connect_to_cluster` makes the devices of this process anew where the
# list of machines has changed, and loses what is assigned to variables from then on. This is what
# it calls itself where the list is the same; it takes other lists, and keeps the devices.
from tensorflow.python.eager import context  # noqa: TID251

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address
from keras_multigpu.engines.tensorflow.cluster.sockets import listen_only_at
from keras_multigpu.engines.tensorflow.names import LOCAL_JOB, REMOTE_JOB

# Read when the runtime starts: TensorFlow then sends each call by itself, and a call that does
# not arrive is an error. In a stream of calls it would be waited for.
_STREAMS = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"


def has_started() -> bool:
    """Whether there are devices already, and maybe variables on them."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def start(workers: dict[int, str], local: Address) -> None:
    """Starts the runtime, with the devices of other machines.

    Args:
        workers: the addresses of other machines, by the numbers of their tasks.
        local: where they reach this process.
    """
    os.environ[_STREAMS] = "False"
    jobs = {LOCAL_JOB: {0: local.numeric}, REMOTE_JOB: workers}
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs))
    tf.config.list_logical_devices()


def update(workers: dict[int, str]) -> None:
    """Changes the other machines; what is in this process stays.

    Args:
        workers: their addresses, by the numbers of their tasks.
    """
    server = copy.deepcopy(context.get_server_def())
    kept = [job for job in server.cluster.job if job.name == LOCAL_JOB]
    del server.cluster.job[:]
    server.cluster.job.extend(kept)
    if workers:
        server.cluster.job.add(name=REMOTE_JOB, tasks=workers)
    context.update_server_def(server)


def version_job() -> str:
    """The job under which a worker serves: it tells those who ask which TensorFlow it has."""
    return f"{REMOTE_JOB}_tensorflow_{re.sub(r'[^0-9A-Za-z]', '_', tf.__version__)}"


def start_server(address: Address, virtual_devices: int) -> None:
    """Starts TensorFlow's server in this process, to be reached by one address only.

    Args:
        address: where: an address of this machine, or 0.0.0.0 for all of them.
        virtual_devices: how many CPU devices to make of its processor.

    Raises:
        ClusterError: if that can't be done.
    """
    check_free(address)
    cluster = tf.train.ClusterSpec({version_job(): {0: address.numeric}})
    settings = tf.compat.v1.ConfigProto(device_count={"CPU": virtual_devices})
    settings.gpu_options.allow_growth = True
    try:
        tf.distribute.Server(cluster, job_name=version_job(), task_index=0, config=settings)
    except tf.errors.OpError as error:
        raise _taken(address) from error
    try:
        listen_only_at(address.ip, address.port)
    except OSError as error:
        raise ClusterError(
            address.name,
            "TensorFlow's server listens on all addresses of a machine, and this system can't "
            f"close it to the others ({error}).",
            f"Have a firewall close the port {address.port}, and bind to '0.0.0.0:{address.port}'; "
            "or serve on Linux.",
        ) from error


def check_free(address: Address) -> None:
    """Refuses an address that is not this machine's, and a port that is taken.

    Raises:
        ClusterError: if it is one.
    """
    with socket.socket() as one:
        try:
            one.bind((address.ip, 0))
        except OSError as error:
            raise ClusterError(
                address.name,
                f"It is no address of this machine ({error.strerror}).",
                "Give one that it has, or '0.0.0.0' for all of them.",
            ) from error
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", address.port))  # TensorFlow takes the port on all addresses
            one.listen()
        except OSError as error:
            raise _taken(address) from error


def _taken(address: Address) -> ClusterError:
    return ClusterError(
        address.name,
        f"Another process of this machine has the port {address.port}, or it may not be used.",
        "End that process, or choose another port.",
    )
