"""What crosses inside hosts and between them: a ring or one driver, estimated or counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_multigpu.reports.workload import Traffic, Workload


def ring_inside(work: Workload, devices: int) -> Traffic:
    """What a device sends and receives in its host, where gradients are added up in rings.

    In the host the gradients are scattered over its devices and gathered again at the end, which
    for g devices is 2 P (g-1) / g bytes each way in 2 (g-1) rounds, the least there is (Patarasuk
    and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    """
    count = _in_host(work, devices)
    size = 2 * (count - 1) / count * work.sizes.gradients
    return Traffic(size, size, 2 * (count - 1), duplex=True)


def ring_between(work: Workload, devices: int) -> Traffic:
    """What a host sends to the next one, where gradients are added up in rings.

    Each device of a host has its part of them, so that all parts together, P bytes, go round
    once to be added up and once to be told: 2 P (h-1) / h bytes for h hosts, however many.
    """
    hosts = work.hosts(devices)
    size = 2 * (hosts - 1) / hosts * work.sizes.gradients
    return Traffic(size, size, 2 * (hosts - 1), duplex=True)


def hubs_inside(work: Workload, devices: int) -> Traffic:
    """What a device sends and receives in its host, where weights go out and gradients come back.

    On a host that has the weights, their device sends all of them once, and receives of the
    gradients P (2n - 3) / (n - 1) bytes, as does every other one in both directions together
    (`docs/design.md`). On other hosts what comes from the driver is spread evenly over the devices,
    and each passes its part on to the others; so do the sums of gradients come together.
    """
    count = _in_host(work, devices)
    sizes = work.sizes
    if count == 1:
        return Traffic()
    if work.hosts(devices) == 1:
        back = (2 * count - 3) / (count - 1)
        return Traffic(sizes.weights, back * sizes.gradients, (1 + back) * sizes.tensors)
    part = (count - 1) / count
    return Traffic(part * sizes.weights, part * sizes.gradients, 2 * part * sizes.tensors)


def driver_between(work: Workload, devices: int) -> Traffic:
    """What the driver of all hosts sends and receives, where one process drives them.

    To each host go the weights once and its rows of the inputs; from each come the sum of its
    gradients and the outputs of its rows, of which the gradients go back. All of it goes over the
    driver's own link, and grows with the hosts. The driver is a machine of its own.
    """
    hosts = work.hosts(devices)
    if hosts < 2:
        return Traffic()
    sizes, rows = work.sizes, work.batch_size
    sent = hosts * sizes.weights + rows * (sizes.inputs + sizes.outputs)
    received = hosts * sizes.gradients + rows * sizes.outputs
    return Traffic(sent, received, 2 * hosts * sizes.tensors)


def _in_host(work: Workload, devices: int) -> int:
    """The devices of a host that has the most of them."""
    return devices if work.per_host is None else min(devices, work.per_host)


def find_busiest(transfers: Iterable[Any], *, duplex: bool = False) -> Traffic:
    """The traffic of the busiest device, from the copies that were counted.

    Args:
        transfers: values with the attributes `source` and `target` (devices), `bytes` and
            `copies`, as `reports.transfers` lists them.
        duplex: as in `Traffic`.
    """
    sent: dict[str, float] = {}
    received: dict[str, float] = {}
    copies: dict[str, float] = {}
    for one in transfers:
        sent[one.source] = sent.get(one.source, 0) + (one.bytes or 0)
        received[one.target] = received.get(one.target, 0) + (one.bytes or 0)
        for name in (one.source, one.target):
            copies[name] = copies.get(name, 0) + one.copies
    if not copies:
        return Traffic(duplex=duplex)
    busiest = max(copies, key=lambda name: (sent.get(name, 0) + received.get(name, 0), name))
    return Traffic(sent.get(busiest, 0), received.get(busiest, 0), copies[busiest], duplex)
