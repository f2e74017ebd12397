"""State that a step changes: what is read afterwards is read after all devices' sums."""

import pytest
import tensorflow as tf
from support.rule_cases.check import DEVICES

from keras_multigpu.engines.tensorflow.partition.step import spread


def _branch(variable):
    tf.cond(
        variable > 100.0,
        lambda: variable.assign(variable * 2.0),
        lambda: variable.assign(-variable),
    )


def _function(variable):
    @tf.function(autograph=False)
    def doubled():
        return variable.assign(variable * 2.0)

    doubled()


def _loop(variable):
    tf.while_loop(
        lambda i: i < 2,
        lambda i: (i + tf.cast(variable.assign(variable * 3.0) > -1e9, tf.int32),),
        (0,),
    )


@pytest.mark.parametrize("change", [_branch, _function, _loop])
def test_order(change):
    results = []
    for devices in (None, DEVICES):
        variable = tf.Variable(1.0)

        def step(x, variable=variable):
            before = variable + 0.0
            variable.assign_add(tf.reduce_sum(x * variable))
            change(variable)
            between = variable + 0.0
            variable.assign_sub(tf.reduce_max(x + variable))
            return before, between, variable + 1.0

        def run(x, step=step, devices=devices):
            return step(x) if devices is None else spread(step, (x,), devices)

        compute = tf.function(run, autograph=False, input_signature=[tf.TensorSpec([None, 2])])
        results.append([[float(one) for one in compute(tf.ones([n, 2]) * n)] for n in (5, 2, 7)])
    assert results[0] == results[1]


def _in_branch(x, variable):
    tf.cond(
        tf.reduce_sum(x) > 0.0,
        lambda: (variable.assign_add(tf.reduce_sum(x)), tf.constant(1.0))[1],
        lambda: tf.constant(0.0),
    )


def _in_case(x, variable):
    branches = [lambda: variable * 2.0, lambda: variable.assign_add(tf.reduce_max(x))]
    tf.switch_case(tf.cast(tf.reduce_sum(x) > 0.0, tf.int32), branches)


def _in_loop(x, variable):
    tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, variable.assign_add(tf.reduce_sum(x))), (0, 0.0)
    )


def _in_loop_over_rows(x, variable):
    tf.map_fn(lambda row: variable.assign_add(row[0]), x)


@pytest.mark.parametrize("change", [_in_branch, _in_case, _in_loop, _in_loop_over_rows])
def test_what_changes_a_state_is_computed_though_nobody_takes_its_result(change):
    results = []
    for devices in (None, DEVICES):
        variable = tf.Variable(0.0)

        def step(x, variable=variable):
            change(x, variable)
            return tf.reduce_sum(x)

        def run(x, step=step, devices=devices):
            return step(x) if devices is None else spread(step, (x,), devices)

        tf.function(run, autograph=False)(tf.reshape(tf.range(1.0, 11.0), [5, 2]))
        results.append(float(variable))
    assert results[0] == results[1] != 0.0


def _read_by_branch(x, variable):
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * variable, lambda: x + variable)


def _read_by_loop(x, variable):
    return tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * variable), (0, x))[1]


def _read_by_loop_over_rows(x, variable):
    return tf.map_fn(lambda row: row * variable, x)


def _changed_by_loop(x, variable):
    """What the rows have in common changes it, and the next iteration reads it."""

    def body(i, z):
        z = z * variable - tf.reduce_mean(z)
        variable.assign_add(tf.reduce_max(z))
        return i + 1, z + variable

    return tf.while_loop(lambda i, z: i < 3, body, (0, x * 0.1))[1]


def _read_by_compiled_function(x, variable):
    return tf.function(lambda z: z * variable, autograph=False, jit_compile=True)(x)


@pytest.mark.parametrize(
    "read",
    [
        _read_by_branch,
        _read_by_loop,
        _changed_by_loop,
        _read_by_loop_over_rows,
        _read_by_compiled_function,
    ],
)
def test_what_is_read_within_is_what_was_assigned_before(read):
    results = []
    for devices in (None, DEVICES):
        variable = tf.Variable(0.0)

        def step(x, variable=variable):
            variable.assign(tf.reduce_sum(x))
            first = read(x, variable)
            variable.assign_add(tf.reduce_max(x))
            return first, read(x, variable), variable + 0.0

        def run(x, step=step, devices=devices):
            return step(x) if devices is None else spread(step, (x,), devices)

        compute = tf.function(run, autograph=False, input_signature=[tf.TensorSpec([None, 2])])
        found = [compute(tf.reshape(tf.range(1.0, 2.0 * n + 1.0), [n, 2])) for n in (5, 2, 7)]
        results.append([one.numpy().tolist() for many in found for one in many])
    assert results[0] == results[1]


def _cubed(x):
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x**3, lambda: x**4)


def _cubed_in_a_loop(x):
    z = tf.while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, z * x), (0, x), maximum_iterations=2)
    return z[1]


def _cubed_in_a_loop_over_rows(x):
    return tf.map_fn(lambda row: row**3, x)


@pytest.mark.parametrize("compute", [_cubed, _cubed_in_a_loop, _cubed_in_a_loop_over_rows])
@pytest.mark.parametrize("rows", [None, 5])
def test_second_derivatives_through_branches_and_loops(compute, rows):
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                result = compute(x)
            size = tf.reduce_sum(inner.gradient(result, x) ** 2)
        return outer.gradient(size, x)

    run = tf.function(
        lambda x: spread(step, (x,), DEVICES),
        autograph=False,
        input_signature=[tf.TensorSpec([rows, 2])],
    )
    x = tf.reshape(tf.range(1.0, 11.0), [5, 2])
    assert run(x).numpy() == pytest.approx(step(x).numpy(), rel=1e-6)
