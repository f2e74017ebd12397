"""Links: the presets, the fit, and copies between virtual devices."""

import keras
import numpy as np
import pytest

from keras_multigpu import engines, reports
from keras_multigpu.reports import PRESETS, Link, measure_link
from keras_multigpu.reports.interconnect import find_link, fit_link


def test_seconds():
    link = Link("link", 100.0, 0.5)
    assert link.seconds(200) == 2.5
    assert link.seconds(200, copies=3) == 3.5
    assert Link("free", float("inf"), 0.5).seconds(1e12) == 0.5
    assert str(Link("free", float("inf"))) == "free: copies cost nothing"
    assert str(Link("near", float("inf"), 2e-6)) == "near: copies take 2 us, of any size"
    assert str(Link("slow", 1e6, 0.5)) == "slow: 0.001 GB/s each way, 5e+05 us per copy"


def test_presets():
    bandwidths = {
        "pcie3": 15.754e9,
        "pcie4": 31.508e9,
        "pcie5": 63.015e9,
        "nvlink2": 150e9,
        "nvlink3": 300e9,
        "nvlink4": 450e9,
        "ethernet10": 1.25e9,
        "ethernet25": 3.125e9,
        "ethernet100": 12.5e9,
    }
    found = {name: link.bytes_per_s for name, link in PRESETS.items()}
    assert found == pytest.approx(bandwidths, rel=1e-3)
    assert all(0 < link.latency_s < 1e-3 for link in PRESETS.values())
    assert find_link("ethernet10") is PRESETS["ethernet10"]
    assert find_link("nvlink") is PRESETS["nvlink4"]
    assert find_link("NVLink4") is PRESETS["nvlink4"]


def test_a_link_is_itself():
    link = Link("mine", 1.0)
    assert find_link(link) is link
    assert find_link(None) is None


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_fit(latency):
    wanted = Link("link", 50.0, latency)
    fitted = fit_link("link", 10, wanted.seconds(10), 1000, wanted.seconds(1000))
    assert fitted.bytes_per_s == pytest.approx(wanted.bytes_per_s)
    assert fitted.latency_s == pytest.approx(wanted.latency_s, abs=1e-12)


def test_fit_of_copies_that_cost_nothing():
    assert fit_link("link", 10, 2.0, 1000, 2.0) == Link("link", float("inf"), 2.0)


def test_fit_never_gives_a_latency_below_zero():
    assert fit_link("link", 10, 1.0, 20, 4.0).latency_s == 0


def test_measured():
    link = measure_link("cpu:2", "cpu:1", repeats=2)
    assert link.name == "cpu:2 to cpu:1"
    assert link.bytes_per_s > 0
    assert link.latency_s >= 0
    assert measure_link(repeats=1).name == "cpu:0 to cpu:1"


def test_what_shares_its_memory_is_not_copied():
    text = str(measure_link("cpu:0", "cpu:1", repeats=1))
    assert ("copies cost nothing" in text) == (keras.backend.backend() == "tensorflow")


@pytest.mark.parametrize("name", ["cpu:1", "cpu:3"])
def test_copy(name):
    tensor = keras.ops.convert_to_tensor(np.arange(6.0).reshape(2, 3))
    copied = engines.current().copy(tensor, name)
    np.testing.assert_array_equal(copied, tensor)
    place = copied.device
    assert name.rpartition(":")[2] == str(getattr(place, "id", place)).rpartition(":")[2]


def test_describe_device():
    assert engines.current().describe_device("cpu:0") == "CPU"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Link("x", 0), r"`bytes_per_s` must be a finite number, above 0. Received: byte"),
        (lambda: Link("x", float("nan")), r"`bytes_per_s` must.*Received: bytes_per_s=nan"),
        (lambda: Link("x", "fast"), r"`bytes_per_s` must.*Received: bytes_per_s='fast'"),
        (lambda: Link("x", 1, -1), r"`latency_s` must be a finite number, 0 or more.*=-1. Check"),
        (lambda: find_link("isdn"), r"`link` must be one of 'pcie3', .*Received: link='isdn'"),
        (lambda: find_link(10), r"or a `Link`. Received: link=10. For other"),
        (lambda: measure_link(repeats=0), r"`repeats` must be a positive.*Received: repeats=0"),
        (
            lambda: measure_link("cpu:9"),
            r"`source` and `target` must be.*Received: source='cpu:9'.*Take",
        ),
        (lambda: measure_link("cpu:1"), "of two devices. Received: source='cpu:1', target='cpu"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_single_device(monkeypatch):
    monkeypatch.setattr(
        "keras_multigpu.reports.interconnect.choose_devices", lambda n, names: ("gpu:0",)
    )
    with pytest.raises(
        ValueError, match=r"needs two devices. Received: source=None.*'gpu:0'. Use a preset"
    ):
        reports.measure_link()
