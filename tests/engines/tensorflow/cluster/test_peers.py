"""What joined processes exchange: here two devices of one process stand for two processes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow import peers, runners
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.results import LocalResult
from keras_multigpu.engines.values import Plan, Request


@pytest.fixture(scope="module")
def pair():
    """Two processes; the first has replicas 0 and 2, the second has replica 1."""
    made = []
    for number in (0, 1):
        device = full_name(f"cpu:{number}")
        with tf.device(device):
            kept = tf.Variable(0.0), tf.Variable(tf.zeros([2], tf.int64)), tf.Variable(0)
        made.append(peers.Peers([0, 1, 0], number, 2, device, *kept))
    return made


def together(pair, call):
    """What each process gets from a call, made by both at the same time."""

    @tf.function
    def step():
        return [call(one) for one in pair]

    return tf.nest.map_structure(lambda one: one.numpy(), step())


def test_each_process_gets_the_results_of_all(pair):
    rows = tf.constant([2, 3, 1])

    def call(one):
        results = []
        for replica in one.own:
            shape = [rows[replica], 2]
            outputs = [
                tf.fill(shape, float(replica)),
                tf.fill(shape, tf.cast(replica, tf.float64)),
                tf.fill([replica + 1], replica == 1),
            ]
            seed = tf.constant([0xFFFFFFF0 + replica, 7], tf.uint32)
            updates = {"9": seed, "10": tf.constant(0.5 + replica)}
            mask = {"_keras_mask": tf.fill(shape, True)}
            losses = [tf.constant(float("nan"))]
            results.append(LocalResult(outputs, [mask, {}, {}], losses, updates))
        return [vars(result) for result in one.results(results, ["9", "10", "11"])]

    for found in together(pair, call):
        for replica, size in enumerate([2, 3, 1]):
            first, second, third = found[replica]["outputs"]
            np.testing.assert_array_equal(first, np.full([size, 2], replica, "float32"))
            assert second.dtype == "float64"
            np.testing.assert_array_equal(third, np.full(replica + 1, replica == 1))
            assert found[replica]["attributes"][0]["_keras_mask"].all()
            assert np.isnan(found[replica]["losses"][0])
            updates = found[replica]["updates"]
            np.testing.assert_array_equal(updates["9"], [0xFFFFFFF0 + replica, 7])
            assert updates["10"] == 0.5 + replica


def test_gradients_are_summed(pair):
    large = np.arange(3_000_000, dtype="float32")  # more than a bucket

    def call(one):
        by = tf.constant(10.0 ** one.own[0])
        given = [tf.constant([1.0, 2.0]) * by, None, tf.constant(large), tf.zeros([0, 3])]
        given.append(tf.cast(by, tf.float64))
        found = one.sum(given)
        assert found[1] is None
        return [found[0], *found[2:]]

    for small, whole, empty, scalar in together(pair, call):
        np.testing.assert_array_equal(small, [11.0, 22.0])
        np.testing.assert_array_equal(whole, 2 * large)
        assert empty.shape == (0, 3)
        assert scalar == 11.0


def test_rows_of_other_lengths(pair):
    def call(one):
        rows = tf.range(one.own[0] + 1)
        return one.of_processes([rows, tf.cast(rows, tf.float32)])

    for found in together(pair, call):
        assert [list(rows) for rows, _ in found] == [[0], [0, 1]]


def test_what_cannot_cross_is_refused(pair):
    with pytest.raises(ValueError, match="exchange numbers and flags. Received: .* 'string'"):
        together(pair, lambda one: one.complete([tf.constant("a")] * len(one.own)))


def test_gradients_of_gradients_are_refused(pair):
    def call(one):
        x = tf.constant([1.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            (total,) = one.sum([x])
        return tape.gradient(total, x)

    with pytest.raises(ValueError, match="first derivatives only"):
        together(pair, call)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000, 4097, 2**20, 2**20 + 1, 10**8 + 7])
def test_sizes_are_rounded_up(size):
    flat = tf.TensorSpec([size], tf.float32)
    _, filled, key = peers._room(flat)
    assert size <= filled <= max(1.04 * size, 64)
    assert key < 2**12
    if size < 10**6:

        @tf.function(input_signature=[tf.TensorSpec([None])])
        def in_step(flat):
            return tf.stack(peers._room(flat))

        assert tuple(in_step(tf.zeros([size])).numpy()) == (size, filled, key)


def test_operations_are_few():
    tensors = [tf.zeros([1000]), None, *(tf.zeros([2**10, 2**10]) for _ in range(40))]
    tensors.append(tf.zeros([3], tf.float64))
    buckets = peers._buckets(tensors)
    assert len(buckets) <= 2 * peers._MOST_BUCKETS
    places = sorted(place for bucket in buckets for place in bucket)
    assert places == [k for k, one in enumerate(tensors) if one is not None]


def test_other_rows_fail_and_are_named(pair):
    def call(one):
        return [one.check_rows({"x": tf.constant([1.0, 2.0]), "y": tf.constant(["a"])})["x"]]

    together(pair, call)
    assert [one.differing() for one in pair] == [None, None]
    with pytest.raises(tf.errors.InvalidArgumentError):
        together(pair, lambda one: one.check_rows(tf.constant([1.0, float(one.own[0])])))
    assert {one.differing() for one in pair} & {1}


def test_other_steps_on_the_same_rows_fail(pair):
    """One process trains, and the other evaluates in a callback."""
    before = [one.arrived for one in pair]
    rows, names = tf.ones([2]), ["train_step", "test_step"]
    with pytest.raises(tf.errors.InvalidArgumentError):
        together(pair, lambda one: one.check_rows(rows, names[one.own == [1]]))
    together(pair, lambda one: one.check_rows(rows, "train_step"))
    assert [one.arrived for one in pair] == [number + 2 for number in before]


def test_what_is_not_done_is_refused(pair, monkeypatch):
    monkeypatch.setattr(runners, "peers_of", lambda devices: pair[0])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    devices = ("cpu:0", "cpu:1", "cpu:2")
    runner = runners.SliceRunner(model, devices)
    plan = Plan(is_whole=True, obstacle="its rows depend on each other")
    with pytest.raises(ValueError, match="must be sliced, on TensorFlow. Received: .* rows depend"):
        runner.run([((tf.zeros([2, 2]),), {})], [None], plan)
    call = ((tf.ones([2, 2]),), {})
    assert runner.plan(call, compiled=False).is_whole  # outside `fit`, each computes alone
    with (
        tf.GradientTape(),
        pytest.raises(ValueError, match="gradients within `fit` and `train_on_batch` only"),
    ):
        runner.plan(call, compiled=False)
    with pytest.raises(
        ValueError, match="`wire_dtype` must be None on devices of several .*wire_dtype=.float16."
    ):
        runners.SliceRunner.check(Request("data", model, devices, {"wire_dtype": "float16"}))
