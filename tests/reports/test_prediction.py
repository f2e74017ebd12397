"""The arithmetic of predictions: what modes make of a workload, and what links make of that."""

import dataclasses
import math

import pytest

from keras_multigpu.reports import Advice, Cut, Link
from keras_multigpu.reports.advice_report import describe
from keras_multigpu.reports.forms import show_bytes, show_seconds
from keras_multigpu.reports.loads import find_busiest, find_load
from keras_multigpu.reports.prediction import Load, Traffic, predict
from keras_multigpu.reports.workload import Sizes, StepTime, Workload

pytestmark = pytest.mark.backend_free

SIZES = Sizes(1000, 800, 10, outputs=4, slots=1600, activations=20, working=800)
WORK = Workload(StepTime(1.0, 0.5), 16, SIZES)
ON_JAX = dataclasses.replace(WORK, by_compiler=True)


@pytest.mark.parametrize(
    ("times", "fixed_s", "row_s"),
    [
        ((4, 3.0, 2, 2.0), 1.0, 0.5),
        ((4, 2.0, 2, 1.0), 0.0, 0.5),
        ((4, 4.0, 2, 1.0), 0.0, 1.0),  # a line would start below zero
        ((4, 2.0, 2, 3.0), 2.0, 0.0),  # the smaller batch took longer
    ],
)
def test_step_time(times, fixed_s, row_s):
    step = StepTime.through(*times)
    assert step == StepTime(fixed_s, row_s)
    assert step.seconds(times[0]) == times[1]


def decide(predictions):
    """The verdict on predictions of one mode."""
    (verdict,) = Advice(predictions).verdicts.values()
    return verdict


def test_data_mode_over_hubs():
    load = find_load("data", WORK, 4)
    assert load.fixed_s == 1
    assert load.rows_s == 0.5 * 4
    assert load.total_s == 0.5 * 16
    assert load.alone_s == 1 + 0.5 * 16
    # P of weights, P (2n - 3) / (n - 1) of gradients
    back = 5 / 3
    assert load.traffic.sent == 1000
    assert load.traffic.received == pytest.approx(back * 800)
    assert load.traffic.copies == pytest.approx((1 + back) * 10)
    assert not load.traffic.duplex
    assert load.memory == 1000 + 800 + 1600 + 800 + 4 * 20  # and the sums of the gradients


def test_tables_that_stay():
    """Of 900 of the 1,000 bytes only the rows that a batch of 16 names cross."""
    sizes = dataclasses.replace(SIZES, gradients=1000, tables=900, looked_up=2)
    moved = find_load("data", dataclasses.replace(WORK, sizes=sizes), 4).traffic
    rows = 16 * 2 * 3 / 4
    assert moved.sent == 100 + rows
    assert moved.received == pytest.approx(5 / 3 * 100 + 2 * rows)


def test_data_mode_in_a_ring():
    load = find_load("data", ON_JAX, 4)
    assert load.traffic == Traffic(1200, 1200, 6, duplex=True)
    assert load.total_s == 0.5 * 16


def test_rows_that_the_devices_do_not_divide():
    assert find_load("data", WORK, 3).rows_s == 0.5 * 6
    load = find_load("data", ON_JAX, 3)
    assert load.rows_s == load.total_s / 3 == 0.5 * 16  # each device computes all of them
    assert load.alone_s == 1 + 0.5 * 16
    assert load.traffic == Traffic()


def test_more_devices_than_rows():
    assert find_load("data", WORK, 64).rows_s == 0.5


@pytest.mark.parametrize("mode", ["data", "tower", "committee", "model"])
@pytest.mark.parametrize("work", [WORK, ON_JAX])
def test_one_device_sends_nothing(mode, work):
    load = find_load(mode, work, 1)
    assert (load.traffic.sent, load.traffic.received, load.traffic.copies) == (0, 0, 0)
    assert load.rows_s == load.total_s == 8
    assert load.alone_s == 9
    one = predict(mode, 1, load, Link("link", 1.0))
    assert one.least_s == one.step_s == one.most_s == 9


def test_towers():
    load = find_load("tower", WORK, 4)
    assert (load.fixed_s, load.rows_s, load.total_s) == (1, 8, 32)
    assert load.alone_s == 36
    assert load.traffic.sent == 1000 + 192
    assert load.traffic.received == pytest.approx(5 / 3 * 800 + 192)
    load = find_load("committee", WORK, 4)
    assert load.alone_s == 36
    assert load.traffic == Traffic(192, 192, 2)
    assert load.memory == 1000 + 800 + 1600 + 16 * 20


def test_model_mode():
    work = dataclasses.replace(WORK, cuts={2: Cut(300, 2, share=0.5, memory=77)})
    load = find_load("model", work, 2)
    assert (load.fixed_s, load.rows_s, load.total_s, load.alone_s) == (1, 4, 8, 9)
    assert load.traffic == Traffic(300, 300, 4)
    assert load.memory == 77


def test_memory_that_is_not_known():
    sizes = dataclasses.replace(SIZES, working=None)
    assert find_load("data", dataclasses.replace(WORK, sizes=sizes), 2).memory is None


@pytest.mark.parametrize(
    ("duplex", "overlap", "processors", "step", "transfer"),
    [
        (False, 0.0, None, 2.0 + 1.4, 1.4),
        (True, 0.0, None, 2.0 + 1.2, 1.2),
        (False, 0.5, None, 2.0 + 0.7, 0.7),
        (False, 1.0, None, 2.0, 0.0),
        (False, 0.0, 1, 8.0 + 1.4, 1.4),
        (False, 0.0, 2, 4.0 + 1.4, 1.4),
        (False, 0.0, 4, 2.0 + 1.4, 1.4),
        (False, 0.0, 8, 2.0 + 1.4, 1.4),
    ],
)
def test_prediction(duplex, overlap, processors, step, transfer):
    load = Load(2.0, 8.0, 6.0, Traffic(100, 20, 2, duplex), None)
    found = predict("data", 4, load, Link("link", 100, 0.1), processors, overlap)
    assert found.step_s == pytest.approx(step)
    assert found.transfer_s == pytest.approx(transfer)
    assert found.speedup == pytest.approx(6 / step)
    assert found.efficiency == pytest.approx(6 / step / 4)


@pytest.mark.parametrize("mode", ["data", "tower", "committee", "model"])
def test_what_does_not_depend_on_the_rows_is_never_divided(mode):
    """It is paid once at least, and by each device at most."""
    cuts = {4: Cut(0, 0, share=0.25)}
    work = Workload(StepTime(1.0, 0.0), 16, SIZES, cuts=cuts)
    found = predict(mode, 4, find_load(mode, work, 4), Link("free", math.inf), 2.0)
    assert (found.least_s, found.step_s, found.most_s) == (1.0, 1.75, 4.0)
    several = 4 if mode in ("tower", "committee") else 1
    assert found.speedup_range == (several / 4, several)
    assert found.is_wide


def test_processors_that_are_shared_share_only_the_rows():
    load = find_load("data", WORK, 4)
    found = predict("data", 4, load, Link("free", math.inf), processors=1.0)
    assert (found.least_s, found.most_s) == (1 + 8, 4 + 8)


def test_a_prediction_is_as_uncertain_as_the_time_it_is_made_from():
    one = predict("data", 2, find_load("data", WORK, 2), Link("free", math.inf))
    found = one.widened((3.0, 2.0, 8.0))
    assert found.least_s == pytest.approx(one.least_s * 2 / 3)
    assert found.most_s == pytest.approx(one.most_s * 8 / 3)
    assert found.step_s == one.step_s
    assert found.is_wide
    assert decide([found]).startswith(
        "Measure it: 2 devices in mode 'data' would be 1.71 times as fast as one (0.56 to "
        "2.00), an efficiency"
    )
    noise = "Rounds on one device differ, because other programs use this machine, or `steps` is"
    assert noise in decide([found])
    assert noise not in decide([ranged(0.6, 0.4)])


def test_no_prediction_is_of_more_than_the_devices():
    load = find_load("data", dataclasses.replace(WORK, step=StepTime(0.0, 1.0)), 4)
    found = predict("data", 4, load, Link("fast", 1e15)).widened([0.5, 1.0, 2.0])
    assert found.speedup_range[1] == 4


def test_times_take_the_place_of_a_prediction():
    load = find_load("data", WORK, 2)
    one = predict("data", 2, load, Link("link", 1e4))
    found = one.with_times((6.0, 5.0, 8.0), alone=[10.0])
    assert (found.least_s, found.step_s, found.most_s) == (5.0, 6.0, 8.0)
    assert found.transfer_s == one.transfer_s
    assert (found.alone_s, found.is_measured) == (10.0, True)
    assert describe(found) == (
        "2 devices in mode 'data' were 1.67 times as fast as one (1.25 to 2.00), an efficiency of "
        "83%; a step took 6.00 s, on one device 10.0 s"
    )
    slow = one.with_times((12.0, 12.0, 12.0), alone=[10.0])
    assert decide([slow]) == (
        "Stay on one device: 2 devices in mode 'data' were 0.83 times as fast as one, an "
        "efficiency of 42%; a step took 12.0 s, on one device 10.0 s."
    )
    # Rounds on one device differ, too.
    noisy = one.with_times((6.0, 5.0, 8.0), alone=[9.0, 10.0, 14.0])
    assert noisy.speedup == pytest.approx(10 / 6)
    assert noisy.speedup_range == (9 / 8, 14 / 5)
    assert noisy.is_wide


@dataclasses.dataclass(frozen=True)
class Transfer:
    source: str
    target: str
    bytes: int
    copies: int


def test_the_busiest_device():
    counted = [
        Transfer("a", "b", 100, 1),
        Transfer("a", "c", 50, 2),
        Transfer("b", "a", 30, 1),
        Transfer("c", "a", 7, 1),
    ]
    assert find_busiest(counted) == Traffic(150, 37, 5)
    assert find_busiest(counted, duplex=True).duplex
    assert find_busiest([]) == Traffic()


def prediction(compute, transfer, *, alone=0.04, devices=2, mode="data", total=None, duplex=False):
    load = Load(
        compute, devices * compute if total is None else total, alone,
        Traffic(transfer * 1e9, 0, duplex=duplex), 1,
    )  # fmt: skip
    return predict(mode, devices, load, Link("link", 1e9), 1 if total else None)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            prediction(0.026, 0.018),
            "0.91 times as fast as one, an efficiency of 45%; 18.0 ms of 44.0 ms go into moving "
            "18.0 MB of weights and gradients",
        ),
        (
            prediction(0.021, 0.004),
            "1.60 times as fast as one, an efficiency of 80%; 4.00 ms of 25.0 ms go into moving "
            "4.00 MB of weights and gradients",
        ),
        (
            prediction(0.01, 0.03, duplex=True),
            "as fast as one, an efficiency of 50%; 30.0 ms of 40.0 ms go into moving "
            "30.0 MB of gradients",
        ),
        (
            prediction(0.03, 0.002, alone=0.048),
            "1.50 times as fast as one, an efficiency of 75%; 6.00 ms of 32.0 ms are lost "
            "because a part of the step doesn't shrink with the rows per device",
        ),
        (
            prediction(0.03, 0.002, total=0.06),
            "0.65 times as fast as one, an efficiency of 32%; 40.0 ms of 62.0 ms are lost because "
            "the devices share processors",
        ),
        (
            prediction(0.04, 0.01, mode="model"),
            "0.80 times as fast as one, an efficiency of 40%; 20.0 ms of 50.0 ms are lost while "
            "devices wait for each other",
        ),
        (
            prediction(0.02, 0.03, mode="model"),
            "0.80 times as fast as one, an efficiency of 40%; 30.0 ms of 50.0 ms go into moving "
            "30.0 MB of activations and their gradients",
        ),
    ],
)
def test_words(found, text):
    assert describe(found) == f"2 devices in mode {found.mode!r} would be {text}"


def test_verdicts():
    slow, fast = prediction(0.026, 0.018), prediction(0.021, 0.004)
    assert decide([slow]) == (
        "Stay on one device: 2 devices in mode 'data' would be 0.91 times as fast as one, an "
        "efficiency of 45%; 18.0 ms of 44.0 ms go into moving 18.0 MB of weights and gradients."
    )
    best = (
        "Take 2 devices in mode 'data': 1.60 times as fast as one, an efficiency of 80%; 4.00 ms "
        "of 25.0 ms go into moving 4.00 MB of weights and gradients."
    )
    assert decide([slow, fast]) == best
    # Four times as many devices that are a little faster are not worth it.
    many = prediction(0.019, 0.001, devices=8)
    assert decide([fast, many]) == best
    assert decide([many]).startswith(
        "Faster, but 8 devices do less than half of what they could: 8 devices in mode 'data' "
        "would be 2.00 times as fast as one, an efficiency of 25%; "
    )
    assert decide([prediction(0.04, 0, devices=1)]).startswith("Nothing to decide")


def test_batches_that_are_not_divided_are_blamed():
    rows = Load(0.9, 12 * 0.9, 1.0, Traffic(), 1, fixed_s=0.1)
    text = decide([predict("data", 12, rows, Link("link", 1e9))])
    assert text.endswith(
        "because the devices don't divide the batch: each computes all of it. Give a multiple of "
        "12 rows."
    )
    timed = predict("data", 12, rows, Link("link", 1e9)).with_times([1.1], [1.0])
    assert decide([timed]).endswith(
        "on one device 1.00 s; " + text[text.index("the devices don") :]
    )
    # Rounds that differ don't make it a question.
    loaded = predict("data", 4, Load(0.9, 3.6, 0.9, Traffic(), 1), Link("link", 1e9))
    assert decide([loaded.widened([0.3, 0.9, 1.5])]).startswith("Stay on one device: 4 devices")


def ranged(fixed, rows, *, devices=2, mode="data"):
    load = Load(rows / devices, rows, fixed + rows, Traffic(), 1, fixed_s=fixed)
    return predict(mode, devices, load, Link("link", 1e9))


def test_verdicts_of_ranges():
    # 0.1 of 1.0 may be paid twice: worth it in any case.
    assert decide([ranged(0.1, 0.9)]) == (
        "Take 2 devices in mode 'data': 1.74 times as fast as one (1.54 to 1.82), an efficiency "
        "of 87%; 75.0 ms of 575 ms are lost because a part of the step doesn't shrink with the "
        "rows per device."
    )
    unknown = decide([ranged(0.6, 0.4)])
    assert unknown.startswith(
        "Measure it: 2 devices in mode 'data' would be 1.05 times as fast as one (0.71 to 1.25), "
    )
    assert unknown.endswith(
        " 600 ms of the step don't depend on the rows, and one device doesn't show whether several "
        "pay this once or each. Run `reports.scaling` on the devices."
    )
    assert decide([ranged(0.99, 0.01)]) == (
        "Stay on one device: 2 devices in mode 'data' would be 0.80 times as fast as one (0.50 to "
        "1.01), an efficiency of 40%; 742 ms of 1.24 s are lost because a part of the step doesn't "
        "shrink with the rows per device."
    )
    # Faster, or slower.
    either = decide([ranged(0.7, 0.3, devices=8)])
    assert either.startswith("Stay on one device: 8 devices in")
    assert either.endswith(" Even 1.36 is less than half of what they could.")
    # What is sure goes before what may be faster.
    assert decide([ranged(0.1, 0.9), ranged(0.1, 0.9, devices=8)]).startswith("Take 2 devices")
    noisy = ranged(0.1, 0.9).with_times((0.4, 0.7, 1.2), alone=[1.0])
    assert decide([noisy]).startswith(
        "Measure it again: 2 devices in mode 'data' were 1.43 times as fast as one (0.83 to 2.50)"
    )


def test_the_report():
    towers = prediction(0.04, 0.001, alone=0.08, mode="committee")
    advice = Advice([prediction(0.04, 0, devices=1), prediction(0.02, 0.005), towers])
    assert list(advice.verdicts) == ["data", "committee"]
    assert advice.notes[:2] == list(advice.verdicts.values())
    # What a verdict tells is not told again.
    assert len(advice.notes) == 3
    assert advice.notes[-1].startswith("A predicted step is shortest if")
    assert advice.verdicts["committee"].startswith("For a committee take 2 devices in mode 'com")
    lines = str(advice).splitlines()
    assert lines[2].split()[:8] == [
        "mode",
        "devices",
        "source",
        "step",
        "at",
        "least",
        "at",
        "most",
    ]
    assert lines[4].split()[:5] == ["data", "2", "predicted", "25.0", "ms"]
    assert advice.to_dataframe()["source"].tolist() == ["predicted"] * 3
    assert advice.to_dataframe()["step"].tolist() == [0.04, 0.025, 0.041]
    left, right = advice.plot().axes
    assert [bar.get_width() for bar in left.containers[1]] == pytest.approx([0, 5, 1])
    assert right.lines[0].get_ydata().tolist() == pytest.approx([1, 1.6])


def test_one_way_to_train_a_model_is_advised():
    """Modes "data" and "model" train the same model; of two that gain, the better one is taken."""
    ways = [prediction(0.025, 0, mode=mode) for mode in ("data", "tower")]
    better = prediction(0.02, 0.001, mode="model")
    verdicts = Advice([*ways, better, prediction(0.022, 0, devices=4)]).verdicts
    assert verdicts["data"].startswith("Mode 'data' gains less than mode 'model': 2 devices in")
    assert verdicts["tower"].startswith("For shared replicas take 2 devices in mode 'tower': 1.60")
    assert verdicts["model"].startswith("Take 2 devices in mode 'model': 1.90 times as fast as one")


def test_verdicts_do_not_contradict_each_other():
    slow = [prediction(0.04, 0.001, mode=mode) for mode in ("model", "tower")]
    verdicts = Advice([prediction(0.02, 0.001), *slow]).verdicts
    assert verdicts["data"].startswith("Take 2 devices in mode 'data': 1.90 times as fast as one")
    for mode in ("model", "tower"):
        assert verdicts[mode].startswith(f"Mode {mode!r} gains nothing: 2 devices in mode {mode!r}")
    verdicts = Advice([ranged(0.6, 0.4), slow[0]]).verdicts
    assert verdicts["data"].startswith("Measure it: 2 devices")
    assert verdicts["model"].startswith("Mode 'model' gains nothing: 2 devices")
    verdicts = Advice([prediction(0.04, 0), slow[0]]).verdicts
    assert all(text.startswith("Stay on one device: 2 devices") for text in verdicts.values())


def test_modes_whose_ranges_overlap_gain_as_much():
    def verdict(first, second, rounds=(1.0,)):
        found = [prediction(first, 0), prediction(second, 0, mode="model")]
        return Advice([one.widened(rounds) for one in found]).verdicts["model"].split(":")[0]

    as_much, less = (f"Mode 'model' gains {one} mode 'data'" for one in ("as much as", "less than"))
    assert verdict(0.02, 0.02001) == as_much
    assert verdict(0.021, 0.022) == less
    assert verdict(0.021, 0.022, (0.94, 1.0, 1.06)) == as_much
    assert verdict(0.021, 0.03, (0.94, 1.0, 1.06)) == less


def test_how_quantities_are_shown():
    assert [show_seconds(one) for one in (0, 1e-5, 0.1234, 0.9996, 123.4)] == [
        "0.00 ms", "0.01 ms", "123 ms", "1.00 s", "123 s",
    ]  # fmt: skip
    assert [show_bytes(one) for one in (0, 999, 1000, 999_999, 12_345_678, 5e15)] == [
        "0 B", "999 B", "1.00 kB", "1.00 MB", "12.3 MB", "5000 TB",
    ]  # fmt: skip


def test_a_model_whose_division_is_not_known():
    match = r"how the model is divided. Received: cuts={}, without 2 devices. Give `cuts={2:"
    with pytest.raises(ValueError, match=match):
        find_load("model", WORK, 2)
