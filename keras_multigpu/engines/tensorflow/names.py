"""Device names: the short ones of this library, and TensorFlow's full ones.

    gpu:0                   /job:localhost/replica:0/task:0/device:GPU:0
    gpu7:2222/gpu:0         /job:worker/replica:0/task:3/device:GPU:0

A machine keeps its task number while this process lives, so a name always means the same device.
Among joined processes of two GPUs each, `gpu:2` is the first GPU of process 1, which is task 1.
"""

from __future__ import annotations

import re

import tensorflow as tf

LOCAL_JOB = "localhost"
REMOTE_JOB = "worker"
JOINED_JOB = "worker"  # as TensorFlow calls it; a process has remote or joined ones, not both

_LOCAL = re.compile(r"(?:/job:localhost/replica:0/task:0)?/?(?:device:)?(cpu|gpu):(\d+)")
_JOINED = re.compile(rf"/job:{JOINED_JOB}/replica:0/task:(\d+)/device:(cpu|gpu):(\d+)")
_REMOTE = re.compile(r"([^/]+:\d+)/(cpu|gpu):(\d+)")
_tasks: dict[str, int] = {}
_number = 0
_counts: list[dict[str, int]] = []


def join(number: int, counts: list[dict[str, int]]) -> None:
    """Names the devices of joined processes: this one's number, and each one's devices by kind."""
    global _number
    _number, _counts[:] = number, counts


def find(device: str) -> tuple[int, int]:
    """The process that has the device of a short name, and the device's number there."""
    kind, _, text = device.partition(":")
    index = int(text)
    for process, counts in enumerate(_counts):
        if index < counts[kind]:
            return process, index
        index -= counts[kind]
    return 0, index


def first(kind: str) -> str:
    """The short name of this process's first device of a kind."""
    return f"{kind}:{sum(counts[kind] for counts in _counts[:_number])}"


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
        task, index = find(device)
        job, device = JOINED_JOB if _counts else LOCAL_JOB, f"{device.partition(':')[0]}:{index}"
    return f"/job:{job}/replica:0/task:{task}/device:{device.upper()}"


def short_name(device: str) -> str:
    """The short name for one of TensorFlow's names."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type is None:
        return device
    kind = spec.device_type.lower()
    if _counts and spec.job == JOINED_JOB:
        return f"{kind}:{sum(one[kind] for one in _counts[: spec.task]) + spec.device_index}"
    short = f"{kind}:{spec.device_index}"
    if spec.job in (None, LOCAL_JOB):
        return short
    workers = {task: worker for worker, task in _tasks.items()}
    return f"{workers[spec.task]}/{short}" if spec.job == REMOTE_JOB else device


def local_name(device: str) -> str | None:
    """The short name of a device of this or a joined process, from either form; else `None`."""
    if _counts and _JOINED.fullmatch(device.lower()):
        return short_name(device)
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
    """The short names of a kind's devices, joined processes' too; starts no runtime."""
    count = sum(counts[kind] for counts in _counts) if _counts else count_own(kind)
    return tuple(f"{kind}:{index}" for index in range(count))


def count_own(kind: str) -> int:
    """How many devices of a kind this process has; does not start TensorFlow's runtime."""
    count = 0
    for physical in tf.config.list_physical_devices(kind.upper()):
        count += len(tf.config.get_logical_device_configuration(physical) or (None,))
    return count


def name_of(physical: tf.config.PhysicalDevice) -> str | None:
    """The short name of a physical device; `None` if it is hidden, or divided into several."""
    parts = parts_of(physical)
    return parts[0] if len(parts) == 1 else None


def parts_of(physical: tf.config.PhysicalDevice) -> tuple[str, ...]:
    """The short names of a physical device's logical ones; none if it is hidden."""
    kind = physical.device_type
    visible = tf.config.get_visible_devices(kind)
    parts = [len(tf.config.get_logical_device_configuration(one) or (None,)) for one in visible]
    if physical not in visible:
        return ()
    place = visible.index(physical)
    first = sum(parts[:place])
    return tuple(f"{kind.lower()}:{first + number}" for number in range(parts[place]))


def is_default(device: str) -> bool:
    """Whether TensorFlow uses the device of this short name by default."""
    return device == first("gpu" if count_own("gpu") else "cpu")


def host_of(device: str) -> str:
    """The part of a TensorFlow name that all devices of a process share."""
    return device.rpartition("/")[0]
