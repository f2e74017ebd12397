"""What joined processes compare of a traced step."""

import jax
import numpy as np
from support.listing_cases import ALIKE, ARRAYS, OTHERS

from keras_multigpu.engines.jax.cluster.compared import listing_of, settings


def _listing(function):
    return listing_of(jax.make_jaxpr(function)(*ARRAYS))


def test_another_computation_has_another_listing():
    found = {name: _listing(function).checksum for name, function in OTHERS.items()}
    assert len(set(found.values())) == len(OTHERS)
    assert found == {name: _listing(function).checksum for name, function in OTHERS.items()}


def test_names_prints_and_what_nobody_uses_do_not_count():
    def printing(x, a, b):
        jax.debug.print("{}", x)
        return ALIKE[0](x, a, b)

    assert len({_listing(function).checksum for function in [*ALIKE, printing]}) == 1


def test_functions_within_are_compared():
    def compiled(scale):
        return lambda x, a, b: jax.jit(lambda x: scale * x)(x)

    assert _listing(compiled(2.0)).checksum != _listing(compiled(3.0)).checksum


def test_keys_are_compared():
    def drawing(seed):
        key = jax.random.key(seed)
        return lambda x, a, b: x + jax.random.normal(key, x.shape)

    assert _listing(drawing(1)).checksum == _listing(drawing(1)).checksum
    assert _listing(drawing(1)).checksum != _listing(drawing(2)).checksum


def test_constants_of_a_trace_around_it_have_no_value_yet():
    @jax.jit
    def outer(scale):
        assert _listing(lambda x, a, b: scale * x).checksum
        return scale

    outer(np.float32(2.0))


def test_a_key_is_read_within_the_trace_of_a_step():
    key, found = jax.random.key(3), []

    @jax.jit
    def outer(x):
        found.append(_listing(lambda x, a, b: x + jax.random.normal(key, x.shape)).checksum)
        return x

    outer(np.float32(2.0))
    assert found == [_listing(lambda x, a, b: x + jax.random.normal(key, x.shape)).checksum]


def test_the_first_difference_is_told():
    one, other = (_listing(OTHERS[name]) for name in ("in turn", "in another turn"))
    assert one.told(one.digests, other.digests).startswith("dot_general")
    one, other = (_listing(OTHERS[name]) for name in ("number", "other number"))
    assert one.told(one.digests, other.digests).endswith(" with 2.0")


def test_settings_that_change_what_a_step_computes():
    before = settings()
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert settings() != before
    assert settings() == before
