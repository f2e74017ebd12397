"""What joined processes exchange: here two devices of one process stand for two processes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow import runners
from keras_multigpu.engines.tensorflow.cluster import collectives, peers
from keras_multigpu.engines.tensorflow.cluster.joint_batches import JointBatches
from keras_multigpu.engines.tensorflow.names import full_name


@pytest.fixture(scope="module")
def pair():
    """Two processes; the first has replicas 0 and 2, the second has replica 1."""
    made = []
    for number in (0, 1):
        device = full_name(f"cpu:{number}")
        with tf.device(device):
            token = tf.Variable(0.0)
        line = collectives.Collectives(number, 2, device, token)
        made.append(peers.Peers([0, 1, 0], line))
    return made


def batches_of(pair, are_parts):
    """The batches of each process."""
    return [JointBatches(one, one.collectives.device, are_parts) for one in pair]


@pytest.fixture(scope="module")
def same(pair):
    """Processes that give the same batches."""
    return batches_of(pair, are_parts=False)


@pytest.fixture(scope="module")
def parts(pair):
    """Processes that give parts of each batch."""
    return batches_of(pair, are_parts=True)


def together(pair, call):
    """What each process gets from a call, made by both at the same time."""

    @tf.function
    def step():
        return [call(one) for one in pair]

    return tf.nest.map_structure(lambda one: one.numpy(), step())


def test_gradients_are_summed(pair):
    large = np.arange(3_000_000, dtype="float32")  # more than a bucket

    def call(one):
        by = tf.constant(10.0 ** one.own[0])
        given = [tf.constant([1.0, 2.0]) * by, tf.constant(large), tf.zeros([0, 3])]
        given.append(tf.cast(by, tf.float64))
        found = one.sum(given)
        return found

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
        together(pair, lambda one: one.of_processes([tf.constant("a")]))


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000, 4097, 2**20, 2**20 + 1, 10**8 + 7])
def test_sizes_are_rounded_up(size):
    filled, key = collectives.room(size)
    assert size <= filled <= max(1.04 * size, 64)
    assert key < 2**12
    if size < 10**6:

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
        def in_step(size):
            return tf.stack(collectives.room(size))

        assert tuple(in_step(size).numpy()) == (filled, key)


def test_operations_are_few():
    tensors = [tf.zeros([1000]), *(tf.zeros([2**10, 2**10]) for _ in range(40))]
    tensors.append(tf.zeros([3], tf.float64))
    buckets = collectives.buckets(tensors)
    assert len(buckets) <= 2 * collectives.MOST_BUCKETS
    places = sorted(place for bucket in buckets for place in bucket)
    assert places == [*range(len(tensors))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 7, 100_003])
def test_gradients_cross_in_fewer_bits(pair, dtype, wire_dtype, size, rng):
    """Each addend and the sum are rounded, and nothing else is."""
    given = [rng.normal(size=size).astype(dtype) for _ in pair]

    def rounded(values):
        return tf.cast(tf.cast(values, wire_dtype), dtype).numpy()

    expected = rounded(sum(map(rounded, given)))
    for found in together(
        pair, lambda one: one.sum([tf.constant(given[one.own == [1]])], wire_dtype)
    ):
        np.testing.assert_array_equal(found[0], expected)


def test_what_is_not_finite_stays_so_in_fewer_bits(pair):
    given = [1.0, np.inf, -np.inf, np.nan, 1e5, 6e4]
    sums = together(pair, lambda one: one.sum([tf.constant(given)], "float16")[0])
    for found in sums:
        np.testing.assert_array_equal(found, [2.0, np.inf, -np.inf, np.nan, np.inf, np.inf])


def test_types_of_few_bits_cross_as_they_are(pair):
    values = tf.constant([1.0 + 2**-10], tf.float16)
    for found in together(pair, lambda one: one.sum([values], "bfloat16")[0]):
        assert found == 2.0 + 2**-9  # which bfloat16 doesn't have


def test_other_rows_fail_and_are_named(same):
    def call(one):
        return [one.check({"x": tf.constant([1.0, 2.0]), "y": tf.constant(["a"])}, "s")[0]["x"]]

    together(same, call)
    assert [one.differing() for one in same] == [None, None]
    with pytest.raises(tf.errors.InvalidArgumentError):
        together(same, lambda one: one.check(tf.constant([1.0, float(one is same[1])]), "s"))
    assert (1, 0, "rows", "") in [one.differing() for one in same]


def test_other_steps_on_the_same_rows_fail(same):
    """One process trains, and the other evaluates in a callback."""
    before = [one.arrived for one in same]
    rows, names = tf.ones([2]), ["train_step", "test_step"]
    with pytest.raises(tf.errors.InvalidArgumentError):
        together(same, lambda one: one.check(rows, names[one is same[1]]))
    found = [one.differing() for one in same]
    assert found[0] == (1, 0, "steps", "train_step") or found[1] == (1, 0, "steps", "test_step")
    together(same, lambda one: one.check(rows, "train_step"))
    assert [one.arrived for one in same] == [number + 2 for number in before]


def test_parts_become_the_whole_batch(parts):
    """Also with a process that has no rows."""
    x = np.arange(12.0).reshape(6, 2)
    flags = np.array([True, False, False, True, True, False])

    def batch(rows):
        return {"x": x[rows], "more": (flags[rows], None, 3), "all": tf.constant(2.0)}

    for bound in (2, 0):
        shares = slice(0, bound), slice(bound, 6)

        def call(one, shares=shares):
            data, _ = one.check(batch(shares[one is parts[1]]), "train_step")
            whole = one.whole(data)
            assert whole["more"][1:] == (None, 3)
            return [whole["x"], whole["more"][0], whole["all"]]

        for found in together(parts, call):
            np.testing.assert_array_equal(found[0], x)
            np.testing.assert_array_equal(found[1], flags)
            assert found[2] == 2.0


@pytest.mark.parametrize("bound", [2, 0])
def test_each_process_gets_the_outputs_of_its_rows(parts, bound):
    shares = slice(0, bound), slice(bound, 6)
    outputs = {"p": tf.range(6), "q": tf.range(18)}

    def call(one):
        _, counts = one.check(np.ones(6)[shares[one is parts[1]]], "predict_step")
        return one.own(outputs, counts)

    for share, found in zip(shares, together(parts, call)):
        np.testing.assert_array_equal(found["p"], np.arange(6)[share])
        np.testing.assert_array_equal(found["q"], np.arange(18).reshape(6, 3)[share].ravel())


@pytest.mark.parametrize(
    "others",
    [
        lambda x: {"x": x, "y": x},
        lambda x: {"y": x},
        lambda x: {"x": tf.cast(x, tf.float64)},
        lambda x: {"x": tf.ones([2, 4])},
    ],
)
def test_parts_that_do_not_fit_are_noticed(parts, others):
    def call(one):
        data = {"x": tf.ones([2, 3])}
        return one.whole(one.check(others(data["x"]) if one is parts[1] else data, "s")[0])

    with pytest.raises(tf.errors.InvalidArgumentError):
        together(parts, lambda one: tf.nest.flatten(call(one), expand_composites=True)[0])
    told = [one.differing() for one in parts]
    number, other, what, form = next(one for one in told if one is not None)
    assert (number, other, what) == (1, 0, "parts")
    assert "float32(" in form or "float64(" in form


def test_other_places_in_the_data_are_noticed(parts):
    """The epochs of one process are shorter."""
    for position, one in zip((2, 0), parts):
        one.begin(one.arrived - position, is_loop=True)
    with pytest.raises(tf.errors.InvalidArgumentError):
        together(parts, lambda one: one.check(tf.ones([2]), "s"))
    found = [one.differing() for one in parts]
    assert found[0] == (1, 0, "passes", "step 3 of a pass") or found[1][3] == "step 1 of a pass"
    for one in parts:
        one.begin(one.arrived, is_loop=True)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (tf.constant(["a"]), "tensor of type 'string'"),
        (tf.sparse.eye(2), "SparseTensor of type 'float32'"),
        (tf.ragged.constant([[1], []]), "RaggedTensor of type 'int32'"),
    ],
)
def test_parts_that_are_no_dense_numbers_are_refused(parts, rows, kind):
    with pytest.raises(ValueError, match=f"dense numbers and flags only, .* Received: a {kind}"):
        parts[0].check({"x": rows}, "train_step")


def test_outputs_that_can_not_be_shared_out_are_refused(parts):
    def outputs_of(output):
        return lambda one: one.own(output, one.check(tf.ones([2]), "s")[1])

    with pytest.raises(ValueError, match="returns the outputs of its rows.*of shape .., without"):
        together(parts, outputs_of(tf.constant(1.0)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a whole number of rows for each"):
        together(parts, outputs_of(tf.ones([7])))


def test_what_is_not_done_is_refused(pair, monkeypatch):
    monkeypatch.setattr(runners, "peers_of", lambda devices: pair[0])
    monkeypatch.setattr(runners, "batches_of", lambda peers: None)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    devices = ("cpu:0", "cpu:1", "cpu:2")
    runner = runners.PartitionRunner(model, devices)
    with pytest.raises(ValueError, match="`parallel.function` needs devices of one process. Rec"):
        runner.function(lambda x: x, None, None)
    call = ((tf.ones([2, 2]),), {})
    outputs = runner.run(call).outputs  # outside `fit`, each computes alone
    np.testing.assert_allclose(outputs, model(tf.ones([2, 2])))
    told = "gradients within `fit` and `train_on_batch` only"
    with tf.GradientTape(), pytest.raises(ValueError, match=told):
        runner.run(call)


SHARES = [[3, 2], [1, 4], [0, 1]]  # of an axis, that each of two processes has
SHAPES = [(5, 3), (2, 5), (1,)]
AXES = [0, 1, 0]


def _split(wholes):
    return [np.split(one, [a], x) for one, (a, _), x in zip(wholes, SHARES, AXES)]


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8", "bool", "complex64"])
def test_shares_are_gathered(pair, dtype, rng):
    wholes = [(9 * rng.random(shape)).astype(dtype) for shape in SHAPES]
    parts = list(zip(*_split(wholes)))

    def gather(one):
        own = list(map(tf.constant, parts[one.collectives.number]))
        return one.gather(own, AXES, SHARES, dtype)

    for found in together(pair, gather):
        for one, whole in zip(found, wholes, strict=True):
            np.testing.assert_array_equal(one, whole)


@pytest.mark.parametrize("wire_dtype", ["float64", "float16"])
def test_each_gets_its_share_of_sums(pair, wire_dtype, rng):
    """In fewer bits each addend is rounded, and the sum is not."""
    given = [[rng.normal(size=shape) for shape in SHAPES] for _ in pair]
    sent = [[one.astype(wire_dtype).astype("float64") for one in some] for some in given]
    expected = list(zip(*_split([one + other for one, other in zip(*sent)])))

    def add(one):
        own = list(map(tf.constant, given[one.collectives.number]))
        return one.sum_own(own, AXES, SHARES, wire_dtype)

    for found, shares in zip(together(pair, add), expected, strict=True):
        for one, share in zip(found, shares, strict=True):
            np.testing.assert_array_equal(one, share)
