"""One driver of all hosts, as on TensorFlow, against a ring of hosts, as on JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_multigpu.reports.links import Link
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.prediction import Prediction, predict
from keras_multigpu.reports.workload import Workload

_ENOUGH = 1.1  # times the step time of the other: then it is the wrong choice


def predict_both(
    work: Workload, devices: int, link: Link, host_link: Link | None
) -> tuple[Prediction, Prediction]:
    """A step of mode `"data"` with one driver, and with a ring."""
    driver, ring = (
        predict(
            "data",
            devices,
            find_load("data", dataclasses.replace(work, partitions=partitions), devices),
            link,
            work.processors,
            host_link=host_link,
        )
        for partitions in (False, True)
    )
    return driver, ring


def last_hosts(work: Workload, link: Link, host_link: Link, most: int) -> int:
    """Up to how many hosts one driver takes at most 10% longer than a ring.

    The batch grows with the hosts: each device's rows stay as they are.

    Args:
        work: what is trained on one host, with `per_host` set.
        link: the link between devices of a host.
        host_link: a host's link to the others.
        most: how many hosts to look at.

    Returns:
        The number of hosts; 1 if two are too many.
    """
    assert work.per_host is not None
    for hosts in range(2, most + 1):
        grown = dataclasses.replace(work, batch_size=hosts * work.batch_size)
        driver, ring = predict_both(grown, hosts * work.per_host, link, host_link)
        if driver.step_s > _ENOUGH * ring.step_s:
            return hosts - 1
    return most


def compare_designs(
    work: Workload, counts: Sequence[int], link: Link, host_link: Link
) -> list[str]:
    """In words, where one driver is no longer the right choice.

    Args:
        work: what is trained, with `per_host` set.
        counts: the numbers of devices that are asked about.
        link: the link between devices of a host.
        host_link: a host's link to the others.
    """
    notes = []
    for count in sorted(count for count in counts if work.hosts(count) > 1):
        driver, ring = predict_both(work, count, link, host_link)
        if driver.step_s > _ENOUGH * ring.step_s:
            notes.append(
                f"On {count} devices in {work.hosts(count)} hosts, one driver (TensorFlow) takes "
                f"{driver.step_s / ring.step_s:.1f} times as long as a process per host (JAX): "
                "its own link carries the weights, gradients and inputs of all hosts."
            )
            break
    return notes
