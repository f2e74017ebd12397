"""What crosses between the devices of a host, and between hosts, in a step of mode `"data"`.

Several hosts are driven in one of two designs. With `cluster.join` a process per host sums the
gradients in a ring. With `cluster.connect` one driver sends the weights to each host and receives
the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_multigpu.reports.prediction import Traffic
from keras_multigpu.reports.workload import Shard, Workload


def outputs_traffic(work: Workload, rows: int) -> Traffic:
    """Outputs of rows on other devices, which are merged on one, and their gradients."""
    size = rows * work.sizes.outputs
    return Traffic(size, size, 2 if rows else 0)


def shard_traffic(work: Workload, shard: Shard, devices: int) -> Traffic:
    """Gradients of P bytes are summed where their parts are, and weights are gathered.

    A device sends P (n - 1) / n bytes each time. For the tables in P it rather sends the inputs of
    its rows, and sums of the other devices' rows and their gradients.
    """
    looked_up = work.sizes.inputs + 2 * shard.sums if shard.sums else 0
    total = 2 * (work.sizes.gradients - shard.tables) + work.batch_size * looked_up
    size = (devices - 1) / devices * total
    copies = 2 * (devices - 1 if work.by_compiler else work.sizes.tensors)
    return Traffic(size, size, copies, duplex=work.by_compiler)


def weights_traffic(work: Workload, devices: int) -> Traffic:
    """Weights and gradients within a host."""
    return (ring_inside if work.by_compiler else hubs_inside)(work, devices)


def ring_inside(work: Workload, devices: int) -> Traffic:
    """A device's traffic where the host sums P bytes of gradients in a ring of g devices.

    The gradients are scattered over the devices and gathered again: 2 P (g-1) / g bytes each way in
    2 (g-1) rounds, which is optimal (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations", 2009).
    """
    count = work.in_host(devices)
    size = 2 * (count - 1) / count * work.sizes.gradients
    return Traffic(size, size, 2 * (count - 1), duplex=True)


def ring_between(work: Workload, devices: int) -> Traffic:
    """A host's traffic in a ring of h hosts: 2 P (h-1) / h bytes, which is less than 2 P.

    Without a compiler (TensorFlow) P includes the outputs of all rows: every host computes the loss
    of the whole batch.
    """
    hosts = work.hosts(devices)
    summed = work.sizes.gradients
    if not work.by_compiler:
        summed += work.batch_size * work.sizes.outputs
    size = 2 * (hosts - 1) / hosts * summed
    return Traffic(size, size, 2 * (hosts - 1), duplex=True)


def hubs_inside(work: Workload, devices: int) -> Traffic:
    """A device's traffic where weights go out through hubs and gradients come back to them.

    In the weights' host their device sends all of them once. It receives P (2n - 3) / (n - 1) bytes
    of gradients (`docs/decisions/2026-11-hubs.md`). In other hosts of one driver its weights arrive
    evenly spread over the devices, which pass their parts on; gradients are summed the same way
    back.
    """
    count, sizes = work.in_host(devices), work.sizes
    if count == 1:
        return Traffic()
    if work.hosts(devices) == 1 or not work.by_driver:
        back = (2 * count - 3) / (count - 1)
        return Traffic(sizes.weights, back * sizes.gradients, (1 + back) * sizes.tensors)
    part = (count - 1) / count
    return Traffic(part * sizes.weights, part * sizes.gradients, 2 * part * sizes.tensors)


def driver_between(work: Workload, devices: int) -> Traffic:
    """The driver's traffic with all hosts; the driver is a separate machine.

    Each host gets the weights once and its rows of the inputs. It returns the sum of its gradients
    and its rows of the outputs, and gets the gradients of these. So the traffic grows with the
    hosts.
    """
    hosts = work.hosts(devices)
    if hosts < 2:
        return Traffic()
    sizes, rows = work.sizes, work.batch_size
    sent = hosts * sizes.weights + rows * (sizes.inputs + sizes.outputs)
    received = hosts * sizes.gradients + rows * sizes.outputs
    return Traffic(sent, received, 2 * hosts * sizes.tensors)


def find_busiest(transfers: Iterable[Any], *, duplex: bool = False) -> Traffic:
    """The busiest device's traffic, from the `engines.Transfer`s that were counted."""
    found: dict[str, Traffic] = {}
    for one in transfers:
        size = one.bytes or 0
        for name, sent in ((one.source, size), (one.target, 0)):
            new = Traffic(sent, size - sent, one.copies)
            found[name] = found.get(name, Traffic(duplex=duplex)) + new
    sums = {(one.sent + one.received, name): one for name, one in found.items()}
    return sums[max(sums)] if sums else Traffic(duplex=duplex)
