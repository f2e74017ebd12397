"""A case, computed by three devices and by one."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.partition.step import spread
from keras_multigpu.engines.tensorflow.weights.divided import DividedVariable
from keras_multigpu.engines.tensorflow.weights.division import Division

NAMES = ["cpu:0", "cpu:1", "cpu:2"]
DEVICES = ["/CPU:0", "/CPU:1", "/CPU:2"]


def check(case, batches=(7, 2, 1), *, is_static=False, compiled=False, is_drawn=False):
    """Asserts the numbers of a case, and that its operation is spread."""
    step = case.step(is_drawn)
    plain = tf.function(step, autograph=False, reduce_retracing=True, jit_compile=compiled or None)
    data = {batch: case.rows(batch) for batch in batches}
    if compiled:
        try:
            plain(*data[batches[0]])
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            pytest.skip(f"XLA does not compile it on one device either: {error.message[:200]}")
    if is_static:
        steps = {batch: _spread(case, step, rows, compiled) for batch, rows in data.items()}
    else:
        specs = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in data[batches[0]]]
        steps = dict.fromkeys(batches, _spread(case, step, specs, compiled))
    for batch, rows in data.items():
        parallel, records, crossings = steps[batch]
        expected = tf.nest.flatten(plain(*rows))
        found = tf.nest.flatten(parallel(*rows))
        for number, (one, other) in enumerate(zip(expected, found)):
            same(one, other, case.tolerance, f"{case}: result {number} of {batch} rows")
        if (batch > 1 or not is_static) and not is_drawn:
            how(case, records, crossings, len(rows))


def check_joined(case, *, is_static=False, compiled=False):
    """Asserts the numbers of a case whose rows are those of several tensors, joined."""
    step = case.of_joined()
    specs = None
    for batch in (7, 2, 1):
        given = [*case.rows(batch), *case.rows(batch, seed=1)]
        if specs is None or is_static:
            sizes = [batch if is_static else None] * len(given)
            specs = [tf.TensorSpec([n, *one.shape[1:]], one.dtype) for n, one in zip(sizes, given)]
            plain = tf.function(step, autograph=False, jit_compile=compiled or None)
            expected = plain.get_concrete_function(*specs)
            found, records, _ = _spread(case, step, specs, compiled)
            are_joined = [one.how for one in records if one.type == "ConcatV2"][: len(given) // 2]
            assert (batch == 1 and is_static) or set(are_joined) == {"spread"}, are_joined
        where = f"{case}: {batch} rows, joined"
        for one, other in zip(tf.nest.flatten(expected(*given)), tf.nest.flatten(found(*given))):
            same(one, other, case.tolerance, where)


def check_elsewhere(case):
    """Asserts the numbers of a case, whatever tensor is split, along whatever axis."""
    for number, (shape, *_) in enumerate(case.specs):
        for axis in range(len(shape)):
            step, given = case.split_elsewhere(number, axis)
            for size in (given.shape[0], None):
                spec = tf.TensorSpec([size, *given.shape[1:]], given.dtype)
                where = f"{case}: tensor {number} split along {axis} ({size})"
                plain = tf.function(step, autograph=False)
                try:
                    expected = plain.get_concrete_function(spec)(given)
                except (ValueError, NotImplementedError, tf.errors.InvalidArgumentError):
                    continue  # it needs the static size
                found = _spread(case, step, [spec], False)[0](given)
                for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
                    same(one, other, case.tolerance, where)


def check_sharded(case):
    """Asserts the numbers of a case one of whose tensors is a variable that is cut."""
    dummy = tf.zeros([4, 1])  # what makes it a step of several rows
    for number, (shape, *_) in enumerate(case.specs):
        for axis in range(len(shape)):
            step, given = case.split_elsewhere(number, axis)
            division = Division.even(given.shape.as_list(), [full_name(one) for one in NAMES], 0)
            if division is None or given.dtype == tf.string:
                continue
            variable = DividedVariable(given.numpy(), division, tf.Variable(given))
            where = f"{case}: tensor {number} cut along {axis}"
            expected = tf.function(step, autograph=False)(given)
            found = _of_variable(step, variable)(dummy)
            for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
                same(one, other, case.tolerance, where)


def _of_variable(step, variable):
    def parallel(rows):
        return spread(lambda _: step(variable.read_value()), (rows,), variable.division.devices)

    return tf.function(parallel, autograph=False)


def _spread(case, step, specs, compiled):
    records = []

    def function(*rows):
        records.clear()
        return spread(step, rows, DEVICES, records=records, compiled=compiled)

    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    cuts = [op for op in traced.graph.get_operations() if op.type == "SplitV"]
    return traced, records, len(cuts)


def same(one, other, tolerance, where):
    """Asserts that two tensors are equal to rounding."""
    one, other = np.asarray(one), np.asarray(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape), where
    if one.dtype.kind in "fc":
        tolerance = max(tolerance, 1e-5 if one.dtype == np.float32 else 0)
        np.testing.assert_allclose(other, one, tolerance, tolerance, err_msg=where)
    else:
        np.testing.assert_array_equal(other, one, err_msg=where)


def how(case, records, cuts, count):
    """Asserts that the operation was spread, and that nothing else was gathered for it."""
    found = {record.how for record in records if record.type == case.type}
    gathered = {record.type for record in records if record.how == "gathered"}
    assert gathered <= set(case.whole), (gathered, str(case))
    if case.traceless:
        assert cuts <= count, f"{case}: made by one device, and sent"
        assert any(record.how == "spread" for record in records)
    else:
        assert "spread" in found, (found, str(case), [(r.type, r.how) for r in records])
