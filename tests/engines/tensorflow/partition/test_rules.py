"""Every rule: the operation itself on one device, and spread over three."""

import dataclasses

import pytest
import tensorflow as tf
from support.rule_cases import CASES
from support.rule_cases.case import case
from support.rule_cases.check import check, check_elsewhere, check_joined, check_sharded

from keras_multigpu.engines.tensorflow.partition.order import CHECKS
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.rules.random import draw_whole

# Tested where whole steps are.
_CUDNN = {"CudnnRNNV3", "CudnnRNNBackpropV3"}
_ROOMS = ("branches", "lists", "loops", "optionals", "pieces", "sparse", "state")
ELSEWHERE = {one for one, rule in RULES.items() if rule.__module__.endswith(_ROOMS)}
ELSEWHERE = (ELSEWHERE | {*CHECKS, *_CUDNN}) - {"AddN", "ZerosLike"}
EVERY = [
    pytest.param(one, id=f"{kind}-{n}")
    for kind, all_ in CASES.items()
    for n, one in enumerate(all_)
]


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 2], [5, 7]), -1)
SEED = [1, 2]


def padded_words(x):
    """The digits of numbers."""
    texts = tf.strings.regex_replace(tf.as_string(x), "(.)", r"\1 ")
    return tf.strings.to_number(tf.strings.split(texts).to_tensor("0"))


def padded_characters(x):
    return tf.strings.unicode_decode(tf.as_string(x), "UTF-8").to_tensor()


def counted_characters(x):
    codes = tf.strings.unicode_decode(tf.as_string(x), "UTF-8")
    return tf.math.bincount(codes, minlength=60, maxlength=60, axis=-1)


def ranges_of(counts):
    """For each row as many numbers as it says."""
    return tf.ragged.range(counts)


def other_ranges(counts):
    return tf.gather(ranges_of(counts + 1), tf.zeros_like(counts))


RAGGED = ("RaggedRange", "RaggedGather", "RaggedTensorToTensor")
TEXTS = ("StringSplitV2", "UnicodeDecode", "RaggedTensorToTensor", "RaggedBincount")
# What one device computes; what follows is spread again.
ONE_DEVICE = {
    "StringSplitV2": case("Mul", lambda x: padded_words(x) * 2.0, "B:i5000", whole=TEXTS),
    "RaggedTensorToTensor": case("Mul", lambda x: padded_words(x) * 2.0, "B:i5000", whole=TEXTS),
    "UnicodeDecode": case("Mul", lambda x: padded_characters(x) * 2, "B:i5000", whole=TEXTS),
    "RaggedBincount": case("Mul", lambda x: counted_characters(x) * 2, "B:i5000", whole=TEXTS),
    "RaggedRange": case("Mul", lambda x: ranges_of(x).to_tensor() * 2, "B:i5", whole=RAGGED),
    "RaggedGather": case("Mul", lambda x: other_ranges(x).to_tensor() * 2, "B:i5", whole=RAGGED),
    "Unique": case("Mul", lambda x: tf.unique(x)[1] * 2, "B:i4"),
    "UniqueWithCounts": case("Mul", lambda x: tf.unique_with_counts(x)[1] * 2, "B:i4"),
    "RandomShuffle": case("Mul", lambda x: tf.sort(tf.random.shuffle(x[:, 0])) * 2.0, "B 3"),
    "StatelessShuffle": case(
        "Mul", lambda x: tf.random.experimental.stateless_shuffle(x[:, 0], SEED) * 2.0, "B 3"
    ),
    "LookupTableFindV2": case("Mul", lambda x: TABLE.lookup(x) * 2, "B 3:i3"),
    "StatelessRandomGammaV3": case(
        "Mul", lambda x: x * tf.random.stateless_gamma(tf.shape(x), SEED, 0.5), "B 3:f"
    ),
    "StatelessRandomPoisson": case(
        "Mul",
        lambda x: x * tf.random.stateless_poisson(tf.shape(x), SEED, 3.0, tf.float32),
        "B 3:f",
    ),
    "StatelessMultinomial": case(
        "Mul",
        lambda x: x * tf.cast(tf.random.stateless_categorical(x, 3, SEED), tf.float32),
        "B 3:f",
    ),
    "Multinomial": case(  # of one class
        "Mul", lambda x: x * tf.cast(tf.random.categorical(x[:, :1], 3), tf.float32), "B 3:f"
    ),
    "StatelessRandomBinomial": case(
        "Mul", lambda x: x * tf.random.stateless_binomial(tf.shape(x), SEED, 9, 0.5), "B 3:i3"
    ),
    "RandomStandardNormal": case(
        "Mul", lambda x: x * tf.sign(tf.random.normal(tf.shape(x)) ** 2), "B 3:f"
    ),
}


@pytest.mark.backend_free
def test_every_type_has_a_case():
    drawn_whole = {
        kind for kind in RULES if getattr(RULES[kind], "__wrapped__", None) is draw_whole
    }
    assert set(RULES) - ELSEWHERE - drawn_whole <= {*CASES, *ONE_DEVICE}


@pytest.mark.parametrize("kind", ONE_DEVICE)
def test_one_device(kind):
    one = dataclasses.replace(ONE_DEVICE[kind], tolerance=1e-6, has_gradient=False)
    check(dataclasses.replace(one, whole=("TopKV2", "StridedSlice", kind, *one.whole)))


@pytest.mark.thin(6)
@pytest.mark.parametrize("case", EVERY)
def test_symbolic(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY[::4])
def test_static(case):
    check(case, is_static=True)


# XLA's own limits and rounding are many: it is tried on what most steps are made of.
COMPILED = (
    "MatMul",
    "Sum",
    "Mean",
    "Softmax",
    "Reshape",
    "Transpose",
    "ConcatV2",
    "Mul",
    "BiasAdd",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in EVERY if one.values[0].type in COMPILED])
def test_compiled(case):
    check(case, (7, 2), compiled=True)


SEVERAL = [
    one
    for one in EVERY
    if sum("B" in text for text in one.values[0].data) > 1 and ":s" not in one.values[0].data[0]
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL[::4])
def test_drawn(case):
    check(case, is_drawn=True)


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", EVERY)
def test_joined(case):
    check_joined(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY[::4])
def test_joined_static(case):
    check_joined(case, is_static=True)


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", EVERY[::4])
def test_elsewhere(case):
    check_elsewhere(case)


def test_one_row_is_not_broadcast():
    """Beside rows whose number is known in the step only, and is one."""
    check_elsewhere(case("AddN", lambda x, y: tf.add_n([x, y]), "B 1", "B 1"))
    product = case("BatchMatMul", lambda x, y: tf.raw_ops.BatchMatMul(x=x, y=y), "1 B 2", "1 2 2")
    check_elsewhere(dataclasses.replace(product, has_gradient=False))


@pytest.mark.thin(4)
@pytest.mark.parametrize("case", EVERY[::3])
def test_sharded(case):
    check_sharded(case)
