"""Device names: the short ones of this library, and TensorFlow's full ones.

    gpu:0                   /job:localhost/replica:0/task:0/device:GPU:0
    gpu7:2222/gpu:0         /job:worker/replica:0/task:3/device:GPU:0

A machine keeps its task number while this process lives, so a name always means the same device.
"""

from __future__ import annotations

import re

import tensorflow as tf

LOCAL_JOB = "localhost"
REMOTE_JOB = "worker"

_LOCAL = re.compile(r"(?:/job:localhost/replica:0/task:0)?/?(?:device:)?(cpu|gpu):(\d+)")
_REMOTE = re.compile(r"([^/]+:\d+)/(cpu|gpu):(\d+)")
_tasks: dict[str, int] = {}


def task_of(worker: str) -> int:
    """A machine's task number."""
    return _tasks.setdefault(worker, len(_tasks))


def full_name(device: str) -> str:
    """TensorFlow's name of a device."""
    remote = _REMOTE.fullmatch(device)
    if remote:
        job, task, device = REMOTE_JOB, task_of(remote[1]), f"{remote[2]}:{remote[3]}"
    elif device.startswith("/"):
        return device
    else:
        job, task = LOCAL_JOB, 0
    return f"/job:{job}/replica:0/task:{task}/device:{device.upper()}"


def short_name(device: str) -> str:
    """The short name for one of TensorFlow's names."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type is None:
        return device
    short = f"{spec.device_type.lower()}:{spec.device_index}"
    if spec.job in (None, LOCAL_JOB):
        return short
    workers = {task: worker for worker, task in _tasks.items()}
    return f"{workers[spec.task]}/{short}" if spec.job == REMOTE_JOB else device


def local_name(device: str) -> str | None:
    """The short name of a device of this process, from either form; else `None`."""
    match = _LOCAL.fullmatch(device.lower())
    return f"{match[1]}:{int(match[2])}" if match else None


def remote_name(device: str) -> str | None:
    """The short name of a device of another machine, from either form; else `None`."""
    if _REMOTE.fullmatch(device):
        return device
    if not device.startswith("/job:"):
        return None
    spec = tf.DeviceSpec.from_string(device)
    return short_name(device) if spec.task in _tasks.values() and spec.device_type else None


def list_devices(kind: str) -> tuple[str, ...]:
    """The short names of this process's devices of a kind; does not start TensorFlow's runtime."""
    count = 0
    for physical in tf.config.list_physical_devices(kind.upper()):
        count += len(tf.config.get_logical_device_configuration(physical) or (None,))
    return tuple(f"{kind}:{index}" for index in range(count))


def is_default(device: str) -> bool:
    """Whether TensorFlow uses the device of this short name by default."""
    return device == ("gpu:0" if list_devices("gpu") else "cpu:0")


def host_of(device: str) -> str:
    """The part of a TensorFlow name that all devices of a process share."""
    return device.rpartition("/")[0]
