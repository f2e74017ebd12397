"""Dimensions as polynomials, against numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_multigpu.engines.tensorflow.partition.sizes import (
    Dim,
    Unknown,
    broadcast,
    divide,
    is_known,
    product,
    symbols_of,
)

pytestmark = pytest.mark.backend_free
NAMES = ("batch", "size0")
SIZES = list(itertools.product((0, 1, 2, 3, 7), repeat=2))


def _value(dim, sizes):
    if not isinstance(dim, Dim):
        return dim
    known = dict(zip(NAMES, sizes))
    return sum(
        factor * int(np.prod([known[one] for one in key])) for key, factor in dim.terms.items()
    )


_term = st.tuples(st.lists(st.sampled_from(NAMES), max_size=2), st.integers(-3, 4))


@st.composite
def _dims(draw):
    result = draw(st.integers(-2, 4))
    for names, factor in draw(st.lists(_term, max_size=3)):
        term = factor
        for name in names:
            term = term * Dim.symbol(name)
        result = result + term
    return result


# On a machine that may be busy.
busy = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@busy
@given(_dims(), _dims())
def test_arithmetic(a, b):
    for sizes in SIZES:
        p, q = _value(a, sizes), _value(b, sizes)
        assert _value(a + b, sizes) == p + q
        assert _value(a - b, sizes) == p - q
        assert _value(a * b, sizes) == p * q
        assert _value(-a, sizes) == -p


@busy
@given(_dims(), _dims())
def test_equal_only_if_for_all_sizes(a, b):
    is_same = all(_value(a, sizes) == _value(b, sizes) for sizes in SIZES)
    assert (a == b) == is_same
    assert a != b or hash(a) == hash(b)


@busy
@given(_dims(), _dims())
def test_order_is_decided_only_if_for_all_sizes(a, b):
    for compare in ("__lt__", "__le__", "__gt__", "__ge__"):
        if isinstance(a, int):
            continue
        try:
            found = getattr(a, compare)(b)
        except Unknown:
            continue
        expected = {getattr(_value(a, sizes), compare)(_value(b, sizes)) for sizes in SIZES}
        assert expected == {found}


@busy
@given(_dims(), _dims())
def test_division_has_no_rest(a, b):
    try:
        found = divide(a, b)
    except Unknown:
        return
    for sizes in SIZES:
        assert _value(found, sizes) * _value(b, sizes) == _value(a, sizes)


@busy
@given(_dims())
def test_a_product_is_divided(a):
    rows = Dim.symbol("batch")
    assert divide(a * rows, rows) == a
    assert divide(a * rows * 3, 3 * rows) == a


_small = st.sampled_from([1, 2, 3, Dim.symbol("batch"), 2 * Dim.symbol("batch")])


@busy
@given(st.lists(_small, max_size=3), st.lists(_small, max_size=3))
def test_broadcast(a, b):
    try:
        found = broadcast(a, b)
    except Unknown:
        return
    for rows in (1, 2, 3):
        shapes = [[_value(dim, (rows, 1)) for dim in one] for one in (a, b)]
        try:
            expected = np.broadcast_shapes(*shapes)
        except ValueError:  # TensorFlow refuses it, too
            continue
        assert tuple(_value(dim, (rows, 1)) for dim in found) == expected


def test_names():
    rows = Dim.symbol("batch")
    assert product([2, rows, 3]) == 6 * rows
    assert product([]) == 1
    assert symbols_of([2, rows * Dim.symbol("size0")]) == {"batch", "size0"}
    assert is_known([1, 2])
    assert not is_known([1, rows])
    assert repr(2 * rows + 1) in ("2*batch + 1", "1 + 2*batch")
