"""A worker: TensorFlow's server for this machine's devices."""

from __future__ import annotations

import re
import socket

import tensorflow as tf

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address
from keras_multigpu.engines.tensorflow.cluster.sockets import listen_only_at
from keras_multigpu.engines.tensorflow.names import REMOTE_JOB


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
