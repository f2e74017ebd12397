"""TensorFlow's runtime in this process: which machines it knows."""

from __future__ import annotations

import copy
import os

import tensorflow as tf

# `tf.config.experimental_connect_to_cluster` makes the devices of this process anew where the
# list of machines has changed, and loses what is assigned to variables from then on. This is what
# it calls itself where the list is the same; it takes other lists, and keeps the devices.
from tensorflow.python.eager import context  # noqa: TID251

from keras_multigpu.engines.remote import Address
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
