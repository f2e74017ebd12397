"""Training on up to 512 GPUs, computed: a process per host (JAX) against one driver (TensorFlow).

    python -m benchmarks.at_scale

Nothing is measured here. The time of a step on one GPU is an input with a named source. The bytes
that cross follow from the models. Links have their nominal speeds, and copies don't overlap with
computations unless stated. Prints Markdown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.processes import markdown_table
from keras_multigpu.reports.interconnect import PRESETS, Link
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.prediction import Load, Prediction, Traffic, predict
from keras_multigpu.reports.workload import Sizes, StepTime, Workload

_FLOAT = 4
_COUNTS = (1, 2, 8, 64, 512)
_PER_HOST, _INSIDE, _BETWEEN = 8, PRESETS["nvlink3"], ("ethernet25", "ethernet100")
_MOST_HOSTS = 1024
_IMAGE = 224 * 224 * 3 * _FLOAT


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on one GPU.

    Attributes:
        name: what to call it.
        values: its variables' values; nearly all of them are trained.
        tensors: its variables.
        inputs: bytes of a row.
        outputs: bytes of a row.
        rows: of a batch on one GPU.
        rows_per_s: that one GPU trains.
    """

    name: str
    values: int
    tensors: int
    inputs: int
    outputs: int
    rows: int
    rows_per_s: float

    def work(self, devices: int, per_host: int) -> Workload:
        """The work with the same number of rows on each device."""
        size = self.values * _FLOAT
        sizes = Sizes(size, size, self.tensors, self.outputs, self.inputs)
        step = StepTime(0.0, 1 / self.rows_per_s)
        return Workload(step, devices * self.rows, sizes, by_compiler=True, per_host=per_host)


_WIDE_ROWS_PER_S = 266_898  # of `python -m benchmarks.wide`, on two processor cores
_CASES = (
    Case("ResNet50", 25_636_712, 320, _IMAGE, 1000 * _FLOAT, 256, 909),
    Case("wide, 25,360 columns", 25_360 * 32 + 65, 4, 80 * 4, 4, 4096, _WIDE_ROWS_PER_S),
    Case("wide, 2,536,000 columns", 2_536_000 * 32 + 65, 4, 80 * 4, 4, 4096, _WIDE_ROWS_PER_S),
)

# 512 Pascal GPUs, 4 in each of 128 servers, on 25 Gbit/s.
_HOROVOD = (
    (Case("ResNet-101", 44_707_176, 626, _IMAGE, 4000, 64, 1656.82 / 16), 0.90),
    (Case("Inception V3", 23_851_784, 378, 299 * 299 * 3 * 4, 4000, 64, 142), 0.90),
    (Case("VGG-16", 138_357_544, 32, _IMAGE, 4000, 64, 154), 0.68),
)
_NVIDIA = (
    (Case("ResNet50, A100, TF32", 25_636_712, 320, _IMAGE, 4000, 256, 909), "nvlink3", 7.70 / 8),
    (Case("ResNet50, V100, FP32", 25_636_712, 320, _IMAGE, 4000, 128, 412), "nvlink2", 7.69 / 8),
)
_ENOUGH = 1.1  # a design whose step takes this many times the other's is the wrong one
_BACKWARD = 2 / 3  # of a step's computing: about twice the forward pass


def predict_designs(
    work: Workload, devices: int, link: Link, host_link: Link | None
) -> tuple[Prediction, Prediction]:
    """A step of mode `"data"` with one driver of all hosts, and with a ring of hosts."""
    loads = [_driver_load(work, devices), find_load("data", work, devices)]
    driver, ring = (predict("data", devices, one, link, host_link=host_link) for one in loads)
    return driver, ring


def _driver_load(work: Workload, devices: int) -> Load:
    """What crosses if one process, on a separate machine, drives the devices of all hosts.

    Within a host weights arrive evenly spread over the devices, which pass their parts on;
    gradients are summed the same way back.
    """
    load = find_load("data", dataclasses.replace(work, by_compiler=False), devices)
    if work.hosts(devices) == 1:
        return load
    count, sizes = work.in_host(devices), work.sizes
    part = (count - 1) / count
    inside = Traffic(part * sizes.weights, part * sizes.gradients, 2 * part * sizes.tensors)
    return dataclasses.replace(load, traffic=inside, between=driver_between(work, devices))


def driver_between(work: Workload, devices: int) -> Traffic:
    """The driver's traffic with all hosts, of which there are several.

    Each host gets the weights once and its rows of the inputs. It returns the sum of its gradients.
    """
    hosts, sizes, rows = work.hosts(devices), work.sizes, work.batch_size
    sent = hosts * sizes.weights + rows * sizes.inputs
    return Traffic(sent, hosts * sizes.gradients, 2 * hosts * sizes.tensors)


def table() -> str:
    """Step times and efficiencies of both designs."""
    rows = [row for case in _CASES for row in _rows(case)]
    header = ["model", "between hosts", "GPUs", "hosts", "process per host, ms", "efficiency"]
    header += ["one driver, ms", "efficiency"]
    return markdown_table(header, rows)


def _rows(case: Case) -> Iterator[list[str]]:
    for name in _BETWEEN:
        for count in _COUNTS:
            work = case.work(count, _PER_HOST)
            driver, ring = predict_designs(work, count, _INSIDE, PRESETS[name])
            yield [
                case.name,
                PRESETS[name].name,
                str(count),
                str(work.hosts(count)),
                *(text for one in (ring, driver) for text in _show(one)),
            ]


def _show(one: Prediction) -> tuple[str, str]:
    return f"{1e3 * one.step_s:,.1f}", f"{one.efficiency:.0%}"


def turning_points() -> str:
    """The number of hosts up to which one driver is at most 10% slower than a process per host."""
    rows = []
    for case in _CASES:
        work = case.work(_PER_HOST, _PER_HOST)
        hosts = [max_driver_hosts(work, _INSIDE, PRESETS[name], _MOST_HOSTS) for name in _BETWEEN]
        rows.append([case.name, *(str(one) for one in hosts)])
    return markdown_table(["model", *(PRESETS[name].name for name in _BETWEEN)], rows)


def max_driver_hosts(work: Workload, link: Link, host_link: Link, most: int) -> int:
    """The number of hosts (1 to `most`) up to which a driver takes at most 10% longer than a ring.

    `work` is what one host trains, with `per_host` set. The batch grows with the hosts.
    """
    assert work.per_host is not None
    for hosts in range(2, most + 1):
        grown = dataclasses.replace(work, batch_size=hosts * work.batch_size)
        driver, ring = predict_designs(grown, hosts * work.per_host, link, host_link)
        if driver.step_s > _ENOUGH * ring.step_s:
            return hosts - 1
    return most


def published() -> str:
    """Published efficiencies beside computed ones."""
    rows = []
    for case, told in _HOROVOD:
        plain, hidden = _ring(case, 512, 4, "pcie3")
        rows.append([case.name, "512 P100", f"{told:.0%}", f"{plain:.0%}", f"{hidden:.0%}"])
    for case, link, told in _NVIDIA:
        plain, hidden = _ring(case, 8, 8, link)
        rows.append([case.name, "8", f"{told:.0%}", f"{plain:.0%}", f"{hidden:.0%}"])
    header = ["model", "GPUs", "published", "computed", "computed, hidden behind the backward pass"]
    return markdown_table(header, rows)


def _ring(case: Case, devices: int, per_host: int, link: str) -> tuple[float, float]:
    """The efficiency without overlap, and with all copies hidden that a backward pass can hide."""
    _, ring = predict_designs(
        case.work(devices, per_host), devices, PRESETS[link], PRESETS["ethernet25"]
    )
    hidden = min(ring.transfer_s, _BACKWARD * ring.compute_s)
    return ring.efficiency, ring.alone_s / (ring.step_s - hidden) / devices


_SETTING = f"""\
GPUs per host: {_PER_HOST}, linked by {_INSIDE}. Every GPU has the same batch
(weak scaling): 256 images or 4,096 rows. One GPU trains 909 images of ResNet50 per second (A100
40GB, TF32 with XLA, batches of 256: NVIDIA DeepLearningExamples,
`TensorFlow/Classification/ConvNets/resnet50v1.5`), and {_WIDE_ROWS_PER_S:,} rows of the wide
model. That is not a GPU's figure: `python -m benchmarks.wide` measured it on two processor cores
(Dense(32) on 80 ones, Dense(1)). The wider model is assumed to be as fast, which flatters it. Links
have the nominal speeds and the assumed latencies of `reports.PRESETS`, and copies don't overlap
with computations. Gradients cross whole, although a batch touches few rows of a wide kernel."""

_SOURCES = """\
Published: Horovod's benchmarks page (github.com/horovod/horovod, docs/benchmarks.rst): 128 servers
with 4 Pascal GPUs each, 25 Gbit/s RoCE; NVIDIA DeepLearningExamples as above, one DGX A100 and one
DGX-1. One P100 trains 142 images per second of Inception V3 and 154 of VGG-16, in batches of 64
(TensorFlow's benchmarks of May 2017, docs_src/performance/benchmarks.md, DGX-1, synthetic data).
For ResNet-101 the page has only the 1656.82 of 16 GPUs, so one GPU is assumed to reach a sixteenth
of it. The GPUs of those servers are assumed to be linked by PCIe 3.0."""


def main() -> None:
    print(f"{_SETTING}\n\n{table()}")
    print("\nHosts up to which one driver takes at most 10% longer than a process per host:\n")
    print(turning_points())
    print(f"\n{_SOURCES}\n\n{published()}")


if __name__ == "__main__":
    main()
