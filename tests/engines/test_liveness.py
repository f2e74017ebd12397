"""The memory of operations that run one after the other."""

import pytest

from keras_multigpu.engines.liveness import Operation, find_peaks

pytestmark = pytest.mark.backend_free


def test_memory_is_free_after_the_last_reader():
    chain = [Operation([f"t{n}"], [(f"t{n + 1}", 10)]) for n in range(5)]
    assert find_peaks(chain) == {"": {"temporaries": 20}}


def test_activations_are_kept_for_the_backward_pass():
    operations = [
        Operation(["x", "w"], [("h", 100)]),
        Operation(["h", "w"], [("y", 1)]),
        Operation(["y"], [("dy", 1)], is_backward=True),
        Operation(["dy", "w"], [("dh", 100)], is_backward=True),
        Operation(["dh", "h"], [("dw", 7)], is_backward=True),
        Operation(["dw"], [("new", 7)]),
    ]
    # When `dw` is made: `h`, and the gradient of `h`, which is gone afterwards.
    assert find_peaks(operations)[""] == {"activations": 100, "gradients": 7, "temporaries": 100}


def test_views_need_no_memory_and_keep_what_they_show():
    operations = [
        Operation([], [("a", 50)]),
        Operation(["a"], [("view", 50)], is_view=True),
        Operation([], [("b", 30)]),
        Operation(["view", "b"], [("c", 1)]),
    ]
    assert find_peaks(operations)[""] == {"temporaries": 81}


def test_results_may_overwrite_what_nothing_else_reads():
    def peak(readers, size=50):
        operations = [
            Operation([], [("a", 50)]),
            Operation(["a"], [("b", size)], may_overwrite=True),
            Operation([*readers, "b"], [("c", 1)]),
        ]
        return find_peaks(operations)[""]["temporaries"]

    assert peak([]) == 51
    assert peak(["a"]) == 101
    assert peak([], size=40) == 90


def test_sums_of_gradients_are_gradients():
    operations = [
        Operation([], [("one", 5)], is_backward=True),
        Operation([], [("two", 5)], is_backward=True),
        Operation(["one", "two"], [("sum", 5)], is_backward=True, is_sum=True),
        Operation(["sum"], [("new", 1)]),
    ]
    assert find_peaks(operations)[""] == {"gradients": 15}


def test_each_device_has_its_own_fullest_moment():
    operations = [
        Operation([], [("a", 50)], device="gpu:0"),
        Operation(["a"], [("sent", 50)], device="gpu:1"),
        Operation(["sent"], [("c", 20)], device="gpu:1"),
        Operation([], [("args", 3)], device="gpu:1", is_kept=True, kind="batch"),
    ]
    peaks = find_peaks(operations)
    assert peaks == {"gpu:0": {"temporaries": 50}, "gpu:1": {"temporaries": 70}}
