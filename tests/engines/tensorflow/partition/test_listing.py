"""What joined processes compare of a traced step."""

import numpy as np
import pytest
import tensorflow as tf
from support.listing_cases import ALIKE, ARRAYS, OTHERS

from keras_multigpu.engines.tensorflow.partition.listing import listing_of


def _listing(function, variables=(), arrays=ARRAYS):
    specs = [tf.TensorSpec(one.shape, one.dtype) for one in arrays]
    traced = tf.function(function).get_concrete_function(*specs)  # has the functions of its graph
    return listing_of(traced.graph, {id(one.handle): k for k, one in enumerate(variables)})[0]


def test_another_computation_has_another_listing():
    found = {name: _listing(function).checksum for name, function in OTHERS.items()}
    assert len(set(found.values())) == len(OTHERS)
    assert found == {name: _listing(function).checksum for name, function in OTHERS.items()}


def test_names_prints_and_what_nobody_uses_do_not_count():
    printing = [*ALIKE, lambda x, a, b: (tf.print(x), ALIKE[0](x, a, b))[1]]
    assert len({_listing(function).checksum for function in printing}) == 1


def _table(value):
    given = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, value])
    table = tf.lookup.StaticHashTable(given, 0)
    return lambda x, a, b: (table.size(), table.lookup(tf.constant(["a", "b"])))


def _text(value):
    return lambda x, a, b: x * tf.strings.to_number(tf.constant(value))


def _texts(value):
    texts = tf.constant(["a", "".join(["b", value])])
    return lambda x, a, b: tf.strings.length(
        tf.strings.join([texts, tf.strings.as_string(a[0, :2])])
    )


@pytest.mark.parametrize(
    ("make", "one", "other"), [(_table, 2, 3), (_text, "2", "3"), (_texts, "c", "d")]
)
def test_what_a_step_has_from_outside_is_compared(make, one, other):
    assert _listing(make(one)).checksum == _listing(make(one)).checksum
    assert _listing(make(one)).checksum != _listing(make(other)).checksum


def test_python_functions_have_automatic_names():
    def step(x, a, b):
        return tf.numpy_function(np.tanh, [x], tf.float32)

    assert _listing(step).checksum == _listing(step).checksum


def test_variables_are_known_by_their_numbers():
    one, other = tf.Variable([1.0]), tf.Variable([1.0])

    def step(first, second):
        return lambda x, a, b: first.assign(2.0 * first + second)

    orders = [step(one, other), step(other, one)]
    assert len({_listing(each, [one, other]).checksum for each in orders}) == 2
    assert len({_listing(each).checksum for each in orders}) == 1  # none of the model's


def test_values_of_other_variables_that_are_alike_whenever_a_step_begins():
    read, counted, mean, weight = (tf.Variable(one) for one in (2.0, 1, 0.0, 1.0))

    def step(x):
        counted.assign_add(1)
        mean.assign(0.9 * mean + 0.1 * tf.reduce_sum(x))  # may differ in rounding
        return weight * x * read

    traced = tf.function(step).get_concrete_function(tf.TensorSpec([None]))
    _, compared = listing_of(traced.graph, {id(weight.handle): 0})
    assert {one.read()[0] for one in compared} == {2.0, 1}


def test_what_functions_within_a_step_read():
    """Of loops, branches and functions; tables, too."""
    scales = [tf.Variable(value) for value in (2.0, 3.0, 4.0)]
    text = tf.Variable("a text")
    tables = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
    tables.insert(tf.constant([3], tf.int64), [5.0])
    inner = tf.function(lambda x: x * scales[0] + tables.lookup(tf.constant(3, tf.int64)))

    def step(x):
        x = tf.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y * scales[1]), (0, x))[1]
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: x * scales[2], lambda: x)
        return inner(x) + tf.cast(tf.strings.length(text), tf.float32)

    spec = tf.TensorSpec([None])
    _, compared = listing_of(tf.function(step).get_concrete_function(spec).graph, {})
    known = [one.read() for one in compared]
    assert sorted(str(value) for value, _ in known) == [
        "2.0", "3.0", "4.0", "[(3, 5.0)]", "b'a text'",
    ]  # fmt: skip
    assert "a table of 1 key, (3, 5.0)" in {told for _, told in known}
    tables.insert(tf.constant([4], tf.int64), [6.0])
    assert [(3, 5.0), (4, 6.0)] in [one.read()[0] for one in compared]


def test_the_first_difference_is_told():
    one, other = (_listing(OTHERS[name]) for name in ("in turn", "in another turn"))
    told = one.told(one.digests, other.digests)
    assert "MatMul" in told
    two, three = (_listing(OTHERS[name]) for name in ("number", "other number"))
    assert two.told(two.digests, three.digests).endswith(" with 2.0")
    assert one.told(one.digests, [*one.digests, 0]) == "nothing more"
