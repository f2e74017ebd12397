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
