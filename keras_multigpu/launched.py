"""Where processes meet: addresses, and what a launcher's environment says of this process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_TF_CONFIG = "TF_CONFIG"
_SLURM = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


_HOST_AND_PORT = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]+):(\d{1,5})")

Place = tuple[str, int, int]
"""A process's place among all: the address at which they meet, their number, and its own."""


def split_address(argument: str, value: object) -> tuple[str, str, int]:
    """The text `"host:port"`, its host and its port; `argument` is named in the error.

    Example:
        >>> split_address("bind", "[fd00::7]:2222")
        ('[fd00::7]:2222', 'fd00::7', 2222)
    """
    match = _HOST_AND_PORT.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(
            f"`{argument}` must have the form 'HOST:PORT', with a port from 1 to 65535. "
            f"Received: {value!r}. Write 'gpu7:2222', '10.0.0.7:2222' or '[fd00::7]:2222', say."
        )
    return match[0], match[1].strip("[]"), int(match[2])


def find_place(environment: Mapping[str, str]) -> Place | None:
    """This process's place by its environment; `None` if no launcher has set it.

    Raises:
        ValueError: if `TF_CONFIG` can't be understood.

    Example:
        >>> find_place({
        ...     "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "1",
        ...     "SLURM_JOB_NODELIST": "gpu[03-06]",
        ... })
        ('gpu03:20077', 4, 1)
    """
    if environment.get(_TF_CONFIG):
        return _by_tf_config(environment[_TF_CONFIG])
    nodes = next((environment[name] for name in _NODES if environment.get(name)), None)
    if nodes is None or not all(environment.get(name) for name in _SLURM):
        return None
    job, count, number = (int(environment[name]) for name in _SLURM)
    # Two jobs whose first node is the same don't meet at one port.
    return f"{_first_node(nodes)}:{20000 + job % 10000}", count, number


def _by_tf_config(text: str) -> Place:
    """The chief, if there is one, is process 0; the workers follow in their order."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        chiefs, workers = list(cluster.get("chief", ())), list(cluster.get("worker", ()))
        kind, index = task["type"], int(task["index"])
        if kind not in ("chief", "worker"):
            raise ValueError(f"a task of the type {kind!r}")
        addresses = [*chiefs, *workers]
        number = index + (len(chiefs) if kind == "worker" else 0)
        return addresses[0], len(addresses), number
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "`TF_CONFIG` must be JSON with a 'cluster' of 'worker' addresses (and a 'chief', if "
            "you like) and the 'task' of this process, a chief or a worker. Received: "
            f"{text!r} ({type(error).__name__}: {error}). Mend the variable, or unset it and give "
            "`coordinator`, `num_processes` and `process_id`."
        ) from error


def _first_node(nodes: str) -> str:
    """The first host of Slurm's short form of a list: `"gpu[03-06,09],old1"`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)
