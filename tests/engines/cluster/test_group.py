"""How a group of processes begins and ends calls, and what it says of a lost one."""

import inspect
import json
import time
import warnings
from concurrent import futures

import keras
import numpy as np
import pytest
from support import process_script as script
from support.boards import Told

from keras_multigpu.cluster import ClusterError
from keras_multigpu.engines.cluster import joint
from keras_multigpu.engines.cluster.board import BEAT
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.cluster.model_facts import facts_of_model


def group_of(told, number=0, **options):
    return Group(told, number, ("a (process 0)", "b (process 1)"), timeout=5.0, **options)


def begin(group, name, facts=None, is_loop=True):
    call = group.open(name, is_loop)
    group.meet(facts or {})
    return call


FIT = json.dumps({"call": "`fit`"})


def test_another_model_is_noticed():
    tanh, relu = meeting_facts(script.build()), meeting_facts(script.build("relu"))
    used = script.build()
    used.predict(script.data()[0][:2], verbose=0)  # in one process only
    assert tanh == meeting_facts(used) == meeting_facts(script.build())
    told = Told(loops__1__1=json.dumps({"call": "`fit`", **relu}))
    with pytest.raises(ClusterError, match="Its model is .*. In process 0 it is ") as caught:
        begin(group_of(told), "fit", tanh)
    assert caught.value.host == "b (process 1)"
    assert "Run the same script in all processes" in caught.value.cure


def meeting_facts(model):
    return {"model": str(facts_of_model(model).checksum)}


def test_another_call_is_noticed():
    group = group_of(Told(loops__1__1=json.dumps({"call": "`evaluate`"})))
    with pytest.raises(ClusterError, match="Its call is `evaluate`. In process 0 it is `fit`. Run"):
        begin(group, "fit")
    with pytest.raises(ClusterError, match="Its call is `evaluate`"):
        begin(group, "fit")  # what is broken stays so


def test_an_interrupted_process_computes_no_more():
    """Both may be interrupted in different steps: they would not meet again."""
    told = Told(loops__1__1=FIT, loops__2__1=FIT)
    for error, is_broken in ((OSError("disk full"), False), (KeyboardInterrupt(), True)):
        group = group_of(told)
        call = begin(group, "fit")
        group.fail(error, call)
        group.calls.close(call)
        assert told.entries["failures/1/0"].startswith(f"stopped with {type(error).__name__}")
        if is_broken:
            with pytest.raises(ClusterError, match="It has stopped with KeyboardInterrupt. Start"):
                begin(group, "fit")
        else:
            begin(group, "fit")


def test_a_difference_is_told_without_a_process_that_waits_elsewhere():
    group = group_of(Told(loops__1__1=FIT))
    begin(group, "fit")
    group.timeout = 0.1
    error = group.differs(1, 0, "steps", "train_step")
    assert "its is 'unknown', and that of process 0 is 'train_step'" in str(error)


def place(number, kind, text):
    return json.dumps([number, kind, text])


def at_end(number):
    return place(number, "end/1/", "the end of `fit`, after 1 step")


def test_other_lengths_of_data_are_noticed():
    told = Told(loops__1__1=FIT, places__1=at_end(2))
    group, come = group_of(told), [1]
    begin(group, "fit")
    group.call.steps += 1
    with group.places.at("step", group.calls.here("step 1")):
        group.check()
    with group.counting(come.__len__):
        group.check()  # data of unknown length may end in this step
        come.append(2)
        expected = "It is at the end of `fit`, after 1 step, and process 0 is at step 2 of `fit`."
        with pytest.raises(
            ClusterError, match=f"{expected} Give the same data, with the same"
        ) as e:
            group.check()
    assert e.value.host == "b (process 1)"
    with pytest.raises(ClusterError, match="It is at the end"):
        group.check()  # what is broken stays so


def test_the_end_is_told_to_those_who_go_on():
    told = Told(loops__1__1=FIT, places__1=place(1, "step", "step 1 of `fit`"))
    group = group_of(told)
    call = begin(group, "fit")
    with pytest.raises(
        ClusterError, match="It is at the end of `fit`, after 0 steps, and process 1"
    ):
        group.end(call)
    assert json.loads(told.entries["places/0"])[:2] == [1, "end/1/"]


def test_data_may_end_later_here():
    """Of data of unknown length a process begins one step more, which finds their end."""
    group = group_of(Told(loops__1__1=FIT, end__1__1="1", places__1=at_end(2)))
    call = begin(group, "fit")
    with group.counting(iter([0, 0, 1, 1, 1, 1, 1, 1]).__next__):
        pass
    with pytest.raises(StopIteration), group.counting(list[int]().__len__):
        raise StopIteration
    group.end(call)
    group.check()


def test_several_batches_in_one_step_are_counted():
    """Of `steps_per_execution` batches, a process may find one less than another."""
    told, come = Told(loops__1__1=FIT, places__1=at_end(3)), []
    group = group_of(told)
    begin(group, "fit")
    with group.counting(come.__len__):
        come += [1, 2]
        group.check()
    assert group.call.begun == 2
    with group.counting(come.__len__):
        come.append(3)
        with pytest.raises(ClusterError, match="process 0 is at step 3 of `fit`. Give the same da"):
            group.check()
    assert group.call.begun == 3


def test_a_call_that_another_process_does_not_make_is_noticed():
    """A callback calls another model, in one process."""
    inner = place(2, "loops/2/", "the beginning of `evaluate` within `fit`, after 1 step")
    group = group_of(Told(loops__1__1=FIT, places__1=inner))
    begin(group, "fit")
    group.call.steps += 1
    with group.places.at("step", group.calls.here("step 1")):
        group.check()
    with (
        group.places.at("step", group.calls.here("step 2")),
        pytest.raises(ClusterError, match="the beginning of `evaluate` within `fit`, after 1 st"),
    ):
        group.check()


def test_where_a_process_is_within_calls():
    told = Told(loops__1__1=FIT, loops__2__1=json.dumps({"call": "`evaluate`"}))
    group = group_of(told)
    assert group.calls.here("step 1") == "step 1 of no call"
    begin(group, "fit")
    group.call.steps += 1
    told.entries["places/1"] = place(1, "end/1/", "the end of `fit`")
    told.entries.pop("loops/2/1")
    with pytest.raises(ClusterError) as caught:
        begin(group, "evaluate")
    expected = "process 1 is at the end of `fit`."
    assert caught.value.problem == (
        f"It is at the beginning of `evaluate` within `fit`, after 1 step, and {expected}"
    )
    assert group.calls.here("step 1") == "step 1 of `evaluate` within `fit`"


def test_what_is_lost_is_named():
    group = group_of(Told(ended__1="ended"))
    with pytest.raises(ClusterError, match=r"^b \(process 1\): It has ended. Start the script"):
        group.check()
    told = Told()
    told.silences[1] = 7.0
    with pytest.raises(ClusterError, match="It has given no sign of life for 7 seconds"):
        group_of(told).check()
    with pytest.raises(ClusterError, match="no sign of life"):
        begin(group_of(told), "fit")


def test_calls_in_two_threads_are_refused():
    group = group_of(Told(loops__1__1=FIT))
    begin(group, "fit")
    with futures.ThreadPoolExecutor() as threads:
        refused = threads.submit(group.open, "fit", True).exception()
    assert "calls in one thread" in str(refused)
    group.open("evaluate", True)  # a callback, in the same thread


def test_an_error_of_texts_that_can_not_be_written_is_told():
    told = Told(loops__1__1=FIT)
    group = group_of(told)
    group.fail(ValueError("caf\udce9"), begin(group, "fit"))
    assert told.entries["failures/1/0"] == r"stopped with ValueError: caf\udce9"


def test_one_that_has_ended_by_an_error_is_lost_with_its_reason():
    """Also for a process that traces a step meanwhile, to which an error alone is no loss yet."""
    told = Told(loops__1__1=FIT)
    group = group_of(told)
    begin(group, "fit")
    told.entries["failures/1/1"] = "stopped with OSError: disk full"
    group.check(heeds_failures=False)
    told.entries["ended/1"] = "ended"
    with pytest.raises(ClusterError, match="It has stopped with OSError: disk full. Start"):
        group.check(heeds_failures=False)


def test_of_three_the_lost_one_is_named_by_all():
    """Although the second process hears of it before the third sees it itself."""
    names, lost = ("a (process 0)", "b (process 1)", "c (process 2)"), Told()
    second, third = (Group(lost, number, names, timeout=5.0) for number in (1, 2))
    lost.silences[0] = 7.0
    with pytest.raises(ClusterError, match=r"^a \(process 0\): It has given no sign") as seen:
        second.check()
    second.fail(seen.value)
    lost.silences.clear()
    with pytest.raises(ClusterError, match=r"^a \(process 0\): It has given no sign") as told:
        third.check()
    assert told.value.host == names[0]
    first = Group(lost, 0, names, timeout=5.0)
    with pytest.raises(
        ClusterError, match=r"^b \(process 1\): It has stopped with ClusterError: a "
    ):
        first.check()


def test_all_adopt_the_verdict_on_one_that_is_out_of_step():
    """Also the one that it names."""
    names = ("a (process 0)", "b (process 1)")
    board = Told(loops__1__1=FIT, places__1=at_end(1))
    first, second = (Group(board, number, names, timeout=5.0) for number in (0, 1))
    begin(first, "fit")
    with pytest.raises(ClusterError) as seen, first.places.at("step", first.calls.here("step 1")):
        first.check()
    first.fail(seen.value)
    with pytest.raises(ClusterError) as told:
        second.check()
    assert str(told.value) == str(seen.value)
    assert told.value.host == names[1]


def test_of_three_the_one_that_differs_from_most_is_named():
    names = ("a (process 0)", "b (process 1)", "c (process 2)")
    other = json.dumps({"call": "`fit`", "model": "A"})
    told = Told(loops__1__1=other, loops__1__2=other)
    with pytest.raises(
        ClusterError, match=r"^a \(process 0\): Its model is B. In process 1 it is A"
    ):
        begin(Group(told, 0, names, timeout=5.0), "fit", {"model": "B"})
    told.entries.update({"weights 1/1/1": "2", "weights 1/1/2": "2"})
    group = Group(told, 0, names, timeout=5.0)
    begin(group, "fit", {"model": "A"})
    assert group.differing("weights", "1") == (0, 1)
    assert "Its weights and those of process 1 differ" in str(group.differs(0, 1, "weights"))


def test_the_first_process_leaves_when_the_others_are_silent():
    """They have said that they end, but still need its service until they have disconnected."""
    told = Told(ended__1="ended")
    silences = iter([0.0, 0.5, 2.0, 3.5])
    told.silence = lambda number: next(silences)
    group_of(told).leave()
    assert list(silences) == []
    assert told.entries["ended/0"] == "ended"
    assert told.entries["stopped"] == "yes"


def test_a_process_that_does_not_come_is_told_of(monkeypatch):
    told = Told()
    group = Group(told, 0, ("a", "b"), timeout=0.0)
    begun = time.monotonic()

    def read(prefix, seconds=0.0):
        if time.monotonic() > begun + 2 * BEAT:
            told.entries["loops/1/1"] = FIT
        return Told.read(told, prefix)

    monkeypatch.setattr(told, "read", read)
    with pytest.warns(UserWarning, match="0 seconds at the beginning of `fit` for b: alive, but"):
        begin(group, "fit")


def test_a_process_that_does_not_come_to_a_step_is_told_of_once():
    group, come = Group(Told(loops__1__1=FIT), 0, ("a", "b"), timeout=0.0), []
    begin(group, "fit")
    with group.counting(come.__len__), warnings.catch_warnings():
        warnings.simplefilter("error")
        group.check()  # this process has not come to it either
        come.append(1)
        with pytest.warns(UserWarning, match="0 seconds at step 1 of `fit` for b: alive, but not"):
            group.check()
        group.check()
        come.append(2)
        group.check()  # nor at a later step: it may be slow in each


def test_other_weights_are_noticed():
    error = group_of(Told()).differs(1, 0, "weights")
    assert "Its weights and those of process 0 differ at step 0. Build the model" in str(error)


def test_the_first_weight_that_differs_is_told():
    mine = Listing.of_values([("a/kernel", np.ones((2, 2))), ("a/name", np.array(["x"]))])
    others = Listing.of_values([("b/kernel", np.ones((2, 2))), ("b/name", np.array(["y"]))])
    told = Told(
        **{"all of weights 0__0__1": json.dumps(others.digests), "weights 1__0__1": "b/name"}
    )
    error = group_of(told).differs(1, 0, "weights", mine)
    assert "differ at step 0. It has b/name; there is a/name. Build the model" in str(error)
    mine = Listing.of_values([("a/kernel", np.ones((2, 2))), ("a/bias", np.zeros(3, "float16"))])
    told.entries["weights 1/0/1"] = "b/bias with a sum of 0.25"
    error = group_of(told).differs(1, 0, "weights", mine)
    assert "It has b/bias with a sum of 0.25; there is a/bias with a sum of 0. Build" in str(error)


@pytest.mark.parametrize(
    ("what", "told", "expected"),
    [
        (
            "steps",
            ("train_step", "test_step"),
            "(process 1): It makes another step than process 0 at step 1: its is 'test_step', and "
            "that of process 0 is 'train_step'. Make the same steps in all processes",
        ),
        (
            "values",
            ("learning_rate=0.1", "learning_rate=0.2"),
            "Its state and that of process 0 differ at step 1: its is learning_rate=0.2, and that "
            "of process 0 is learning_rate=0.1. Change weights, learning rates and other settings",
        ),
        (
            "passes",
            ("step 1 of a pass", "step 3 of a pass"),
            "It is at another place in its data than process 0 at step 1: at step 3 of a pass, and "
            "process 0 at step 1 of a pass. Give each process a part of the data with the same num",
        ),
        (
            "parts",
            ("(float32(rows, 2),)", "(float32(rows, 3),)"),
            "Its part of a batch does not fit to that of process 0 at step 1: it is (float32(rows, "
            "3),), and that of process 0 is (float32(rows, 2),). Give all processes parts of the ",
        ),
        (
            "values",
            ("learning_rate=0.1", "learning_rate=0.1"),
            "its is learning_rate=0.1, and that of process 0 is the same, to these digits. Change",
        ),
        (
            "programs",
            ("mul of (4, 8)", "mul of (4, 8)"),
            "at step 1: mul of (4, 8); there the same with another constant or setting. Build and",
        ),
        (
            "steps",
            ("train_step", "train_step"),
            "its is 'train_step', and that of process 0 is 'train_step'. Make the same steps",
        ),
    ],
)
def test_what_differs_is_told(what, told, expected):
    group = group_of(Told(**{f"{what} 0__0__1": told[1]}))
    group.call.steps += 1
    error = group.differs(1, 0, what, told[0])
    assert expected in str(error)
    with pytest.raises(ClusterError, match=r"^b \(process 1\): It"):
        group.open("fit", is_loop=True)


def test_parts_need_equal_numbers_of_batches():
    group = group_of(Told(places__1=at_end(1), loops__1__1=FIT), data="parts")
    begin(group, "fit")
    with (
        group.places.at("step", group.calls.here("step 1")),
        pytest.raises(ClusterError, match="is at step 1 of `fit`. Give each process a part of"),
    ):
        group.check()


def alike(monkeypatch):
    """A group of two where the other process does what this one does."""
    told = Told()

    def read(prefix, seconds=0.0):
        for key, value in list(told.entries.items()):
            if key.endswith("/0"):
                told.entries.setdefault(f"{key.removesuffix('0')}1", value)
        return Told.read(told, prefix)

    monkeypatch.setattr(told, "read", read)
    return group_of(told), told


def test_a_call_within_another(monkeypatch):
    """A callback of a `fit` trains another model, by a loop and by single steps."""
    group, told = alike(monkeypatch)
    outer = begin(group, "fit")
    group.call.steps += 1
    inner = begin(group, "fit")
    for _ in range(5):
        group.call.steps += 1
    group.end(inner)
    group.calls.close(inner)
    assert told.entries[f"end/{inner.number}/0"] == "5"
    steps = begin(group, "single steps", is_loop=False)
    group.call.steps += 1
    assert group.call is steps
    assert group.calls.resume(outer)  # which ends the single steps
    group.check()
    group.call.steps += 1
    begin(group, "single steps", is_loop=False)
    group.end(outer)  # which is not the end of the single step
    group.calls.close(outer)
    assert told.entries[f"end/{outer.number}/0"] == "2"
    assert group.call.number == 0


def test_single_steps_are_one_call_until_another(monkeypatch):
    group, _ = alike(monkeypatch)
    first = begin(group, "single steps", is_loop=False)
    assert group.calls.resume(first)
    loop = begin(group, "evaluate")
    group.call.steps += 1
    group.end(loop)
    group.calls.close(loop)
    assert not group.calls.resume(first)
    second = begin(group, "single steps", is_loop=False)
    group.call.steps += 1
    group.call.steps += 1
    group.check()  # these steps are none of the loop that has ended
    assert group.calls.resume(second)


def test_the_end_of_an_outer_call_is_noticed(monkeypatch):
    group, told = alike(monkeypatch)
    outer = begin(group, "fit")
    group.call.steps += 1
    begin(group, "fit")
    group.check()
    told.entries[f"failures/{outer.number}/1"] = "stopped with ValueError"
    with pytest.raises(ClusterError, match="It has stopped with ValueError"):
        group.check()


def test_what_was_written_in_past_calls_is_deleted(monkeypatch):
    group, told = alike(monkeypatch)
    outer = begin(group, "fit")
    for _ in range(4):
        inner = begin(group, "evaluate")
        group.differing("weights", "equal")
        group.end(inner)
        group.calls.close(inner)
    written = {key for key, value in told.entries.items() if key.endswith("/0") and value}
    kinds = ("end", "loops", "weights 1")
    kept = {f"{kind}/{k}/0" for kind in kinds for k in (inner.number - 1, inner.number)}
    assert written == kept | {f"loops/{outer.number}/0"}


class Steps:
    """Those of a model of a group."""

    model, call, number, settings, is_running = None, None, 0, "", False

    def __init__(self, group):
        self.group = group


@pytest.fixture
def described(monkeypatch):
    monkeypatch.setattr(joint, "facts_of_model", lambda model: "a model")
    monkeypatch.setattr(joint, "facts_of_compilation", lambda model: "a compilation")
    known = {"devices": ("cpu:0", "cpu:1"), "_parallel_options": {}}
    model = type("Model", (), known)
    monkeypatch.setattr(Steps, "model", model)


@pytest.mark.usefixtures("described")
def test_single_steps_in_a_models_own_loop_are_the_loops(monkeypatch):
    group, _ = alike(monkeypatch)
    steps, other = Steps(group), Steps(group)
    with joint.together(steps, "fit"):
        steps.is_running, loop = True, steps.call
        with pytest.raises(ValueError, match="bad"), joint.together(steps, "a step", is_loop=False):
            raise ValueError("bad rows")
        with joint.together(other, "fit"), joint.together(steps, "a step", is_loop=False):
            pass
        assert group.call is steps.call is loop
    assert loop.has_ended
    assert group.call.number == 0


@pytest.mark.usefixtures("described")
def test_an_error_is_told_under_the_call_that_it_left(monkeypatch):
    group, told = alike(monkeypatch)
    steps, other = Steps(group), Steps(group)

    def fit():
        with joint.together(steps, "fit"):
            with joint.together(other, "single steps", is_loop=False):
                pass
            raise ValueError("in a callback")

    with pytest.raises(ValueError, match="callback"):
        fit()
    assert told.entries["failures/1/0"] == "stopped with ValueError: in a callback"
    assert group.call.number == 0


def test_one_process_keeps_the_callbacks_that_write(tmp_path):
    steps = Steps(group_of(Told(), number=1))
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")

    def named(x, callbacks=None):
        """As Keras's `fit`."""

    def passed_on(*args, **kwargs):
        """As a model that has a `fit` of its own."""

    x = {"callbacks": 1.0}
    for loop in (named, passed_on):
        args, kwargs = joint.write_once(steps, loop, (x,), {"callbacks": [log]})
        given = inspect.signature(named).bind(*args, **kwargs).arguments
        assert given["x"] == x
        assert [type(one) for one in given["callbacks"]] == [keras.callbacks.Callback]
