"""Variables whose values are spread over processes, and how these read them: in one process."""

import types

import jax
import keras
import numpy as np
import pytest
from support.boards import Told

from keras_multigpu import make_parallel
from keras_multigpu.engines.cluster.places import END
from keras_multigpu.engines.jax.cluster import joint, spread_variables
from keras_multigpu.engines.jax.cluster.processes import WEIGHTS, Group
from keras_multigpu.engines.jax.joint_steps import JointJaxSteps
from keras_multigpu.engines.jax.state.state_shards import StateShards


def _layout(shape=(8, 6), count=4):
    return StateShards([f"cpu:{number}" for number in range(count)], "weights").sharding(shape)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("keras_multigpu.engines.jax.state.state_shards._LEAST", 3)


def _spread(value):
    variable = keras.Variable(value, name="kernel")
    spread_variables.adopt(variable, _layout(value.shape))
    return variable


def test_a_value_is_only_lent_to_steps(rng):
    variable = _spread(rng.normal(size=(8, 6)).astype("float32"))
    assert isinstance(variable, keras.Variable)
    assert "spread over the devices of several processes" in repr(variable)
    told = r"by itself: each has a part. Received: 'kernel' of shape \(8, 6\), used outside of"
    for use in (variable.numpy, lambda: variable + 1, lambda: keras.ops.sum(variable)):
        with pytest.raises(RuntimeError, match=told):
            use()
    with spread_variables.lending(lambda: None):
        lent = variable.value
        uses = (
            lambda: np.asarray(lent),
            lambda: jax.numpy.sum(lent),
            lambda: variable + 1,
            lambda: lent.astype("float64"),
        )
        for use in uses:
            with pytest.raises(RuntimeError, match=told):
                use()
    (array, number) = spread_variables.arrays_of([lent, 3])
    assert array is variable._value
    assert number == 3
    with keras.StatelessScope([(variable, array)]):
        assert variable.value is array


def test_what_is_assigned_is_cut_and_compared_once(rng):
    first, second = (rng.normal(size=(8, 6)).astype("float32") for _ in range(2))
    variables = [_spread(first), _spread(second)]
    old = spread_variables.take_digests(variables)
    assert [place for place, _ in old] == [0, 1]
    assert spread_variables.take_digests(variables) == []
    variables[1].assign(first)
    assert spread_variables.take_digests([*variables, keras.Variable(first)]) == [(1, old[0][1])]
    shards = variables[1]._value.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 6)] * 4
    variables[1].assign(variables[0])  # as averages of weights are
    assert variables[1]._value is variables[0]._value
    replicated = jax.device_put(
        second, jax.sharding.NamedSharding(_layout().mesh, jax.sharding.PartitionSpec())
    )
    variables[0].assign(replicated)
    assert variables[0]._value.sharding.is_equivalent_to(_layout(), 2)
    np.testing.assert_array_equal(variables[0]._value, second)


def test_one_template_is_spread_over_one_set_of_devices(rng):
    variable = _spread(rng.normal(size=(8, 6)))
    spread_variables.adopt(variable, _layout())
    with pytest.raises(ValueError, match="'kernel', which another .* over 4 devices, and 2 other"):
        spread_variables.adopt(variable, _layout(count=2))


@pytest.mark.parametrize(("option", "value"), [("run_eagerly", True), ("jit_compile", False)])
def test_steps_that_are_not_compiled_are_refused(option, value):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    parallel = make_parallel(model, 2, shard="weights")
    parallel.compile("sgd", "mse", **{option: value})
    parallel.make_train_function()
    steps = types.SimpleNamespace(model=parallel, _readings=object())
    with pytest.raises(ValueError, match=f"must compile the steps.* Received: {option}="):
        JointJaxSteps.make(steps, "train_function", parallel.make_train_function, force=True)


def test_after_an_error_no_process_waits_for_others(monkeypatch):
    """They may be anywhere. The variables get back what the step had of them."""
    parallel = make_parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]), 2)
    steps, weights = parallel._parallel_steps, parallel.trainable_variables
    before = parallel.get_weights()
    for weight in weights:
        spread_variables.adopt(weight, _layout(count=2))

    def meet():
        raise AssertionError("It waits.")

    def step():
        steps.lent.latest = [weight._value for weight in weights], []
        for weight in weights:
            weight._value = None
        raise OSError("disk full")

    monkeypatch.setattr(steps, "lending", lambda: spread_variables.lending(meet))
    with pytest.raises(OSError, match="disk full"):
        steps.run_batch(step, (), {})
    for weight, value in zip(weights, before, strict=True):
        np.testing.assert_array_equal(weight._value, value)


class Waits:
    """A group that counts its waits."""

    count = 0

    def wait(self, value):
        self.count += 1
        jax.block_until_ready(value)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 6), "float32"), ((3, 4, 8), "bfloat16"), ((6, 10), "int8"), ((2, 9), "float32")],
)
def test_read_piece_by_piece(shape, dtype, rng, monkeypatch):
    value = rng.normal(size=shape)
    if dtype == "float32":
        value.reshape(-1)[:3] = -0.0, np.nan, np.inf
    variable = keras.Variable(value, dtype=dtype)
    whole = np.asarray(variable.value)
    spread_variables.adopt(variable, _layout(shape))
    monkeypatch.setattr(
        spread_variables, "_BYTES", 20 * whole.itemsize
    )  # 5 elements of each device
    group = Waits()
    read = spread_variables.gather(variable._value, variable.layout, group, wanted=True)
    assert read.tobytes() == whole.tobytes()
    kept = int(np.prod(variable.layout.shard_shape(shape)))
    assert group.count == -(-kept // 5)
    assert spread_variables.gather(variable._value, variable.layout, group, wanted=False) is None


def test_a_process_that_waits_takes_part_in_a_reading():
    told = Told()
    group = Group(told, 0, ("a (process 0)", "b (process 1)"), timeout=5.0)
    call, inner = group.open("fit", is_loop=True), group.open("fit", is_loop=True)
    seen = []

    def take_part(kinds):
        seen.append(kinds)
        call.readings += 1
        if len(seen) == 2:  # the other process goes on to the end of its call
            told.write(f"{END}/{inner.number}/1", "0")

    call.take_part = inner.take_part = take_part
    group.attend()
    assert seen == []
    told.entries[f"readings/{call.number}/1"] = "1"
    group.attend()
    group.attend()
    assert seen == [None]
    told.entries[f"readings/{call.number}/1"] = "2"
    group.end(inner)
    assert seen == [None, None]
    group.ask(call)
    assert told.entries[f"readings/{call.number}/0"] == "3"


class Late(Told):
    """A board on which news comes after a while."""

    reads = 0

    def __init__(self):
        super().__init__()
        self.later = {}

    def read(self, prefix, seconds=0.0):
        self.reads += 1
        if self.reads == 3:
            self.entries |= self.later
        return super().read(prefix, seconds)


def test_a_step_waits_while_others_read(monkeypatch):
    """The comparison with which it begins shows it, before the board does."""
    told = Late()
    group = Group(told, 0, ("a (process 0)", "b (process 1)"), timeout=5.0)
    call = group.open("fit", is_loop=True)
    told.later[f"readings/{call.number}/1"] = "1"
    seen = []

    def take_part(kinds):
        seen.append(kinds)
        call.readings += 1

    call.take_part = take_part
    mine = []

    def exchange(numbers, mesh, group):
        mine.append(numbers)
        return [numbers, [WEIGHTS, 0] if len(mine) == 1 else numbers]

    monkeypatch.setattr(joint, "exchange", exchange)
    mesh = types.SimpleNamespace(device_ids=np.arange(2))
    step = joint.Step("train_step")
    assert joint.compare_steps([np.ones(3)], step, mesh, group) == [3, 3]
    assert seen == [[mine[0][0], WEIGHTS]]
    assert len(mine) == 2
