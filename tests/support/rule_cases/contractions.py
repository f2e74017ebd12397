"""Cases of contractions, reductions, and what runs along an axis."""

import functools

import tensorflow as tf
from support.rule_cases.case import case

raw = tf.raw_ops
REDUCTIONS = {
    **dict.fromkeys(("Sum", "Max", "Min"), ":n"),
    **{"Mean": "", "Prod": ":p", "Any": ":b", "All": ":b"},
}


def _reductions(kind, letter):
    of = getattr(tf, f"reduce_{kind.lower()}")
    has = {"whole": ("Cumprod",)} if kind == "Prod" else {}
    yield case(kind, of, f"B n{letter}", axis="any", **has)
    yield case(kind, of, f"n B m{letter}", axis="any", **has)
    yield case(kind, lambda x: of(x, [0, -1], keepdims=True), f"n B m{letter}", **has)
    yield case(kind, lambda x: of(x, [-2, 0]), f"n B m{letter}", **has)
    yield case(kind, lambda x: of(x), f"B n{letter}", **has)
    yield case(kind, lambda x, axis: of(x, axis, True), f"B n 1{letter}", axis="any", **has)
    yield case(kind, lambda x: of(x, 0), f"B{letter}", **has)


CASES = {kind: list(_reductions(kind, letter)) for kind, letter in REDUCTIONS.items()}
CASES["Mean"] += [
    case("Mean", lambda x: tf.reduce_mean(x, 1), "B n:i9"),
    case("Mean", lambda x: tf.reduce_mean(x, 0), "B n:h", tolerance=2e-3),
]


def _matmul(**settings):
    return lambda a, b: tf.matmul(a, b, **settings)


def _batch(version, **settings):
    if version == "BatchMatMulV3":
        return lambda a, b: raw.BatchMatMulV3(x=a, y=b, Tout=tf.float64, **settings)
    return lambda a, b: getattr(raw, version)(x=a, y=b, **settings)


CASES["MatMul"] = [
    case("MatMul", _matmul(), "B k", "k n"),
    case("MatMul", _matmul(), "n B", "B m"),
    case("MatMul", _matmul(), "n k", "k B"),
    case("MatMul", _matmul(transpose_a=True), "B n", "B m"),
    case("MatMul", _matmul(transpose_b=True), "B k", "n k"),
    case("MatMul", _matmul(transpose_a=True, transpose_b=True), "k B", "n k"),
    case("MatMul", lambda a: tf.matmul(a, a, transpose_b=True), "B n", whole=("Transpose",)),
    case("MatMul", lambda a: tf.matmul(a, a, transpose_a=True), "B n"),
]
for _version in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
    CASES[_version] = [
        case(_version, _batch(_version), "B n k", "B k m", has_gradient=_version[-1] == "2"),
        case(
            _version,
            _batch(_version, adj_x=True),
            "n B k",
            "n B m",
            has_gradient=_version[-1] == "2",
        ),
        case(
            _version,
            _batch(_version, adj_y=True),
            "n B k",
            "n m k",
            has_gradient=_version[-1] == "2",
        ),
    ]
for _version in ("BatchMatMulV2", "BatchMatMulV3"):
    CASES[_version] += [
        case(_version, _batch(_version), "B n k", "k m", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "B 1 n k", "m+1 k l", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "n 1 m k", "B k l", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "n m B", "B k", has_gradient=_version[-1] == "2"),
    ]
CASES["Einsum"] = [
    case("Einsum", lambda x, w: tf.einsum("bij,jk->bik", x, w), "B i j", "j k"),
    case("Einsum", lambda x, y: tf.einsum("bij,bkj->bik", x, y), "B i j", "B k j"),
    case("Einsum", lambda x, y: tf.einsum("ib,bj->ij", x, y), "i B", "B j"),
    case("Einsum", lambda x: tf.einsum("bij->jb", x), "B i j"),
    case("Einsum", lambda x, w: tf.einsum("...x,xy->...y", x, w), "B n x", "x y"),
    case("Einsum", lambda x, y: tf.einsum("...ij,...jk->...ik", x, y), "B n i j", "1 j k"),
    case("Einsum", lambda x: tf.einsum("i...->...i", x), "i B n"),
]
CASES["L2Loss"] = [case("L2Loss", tf.nn.l2_loss, "B n"), case("L2Loss", tf.nn.l2_loss, "n B m")]
CASES["Cross"] = [
    case("Cross", tf.linalg.cross, "B 3", "B 3"),
    case("Cross", tf.linalg.cross, "n B 3", "n B 3"),
]
_sparse = tf.sparse.from_dense(tf.constant([[0.0, 2.0, 3.0], [1.0, 0.0, 0.0]], tf.float64))
CASES["SparseTensorDenseMatMul"] = [
    case("SparseTensorDenseMatMul", lambda x: tf.sparse.sparse_dense_matmul(_sparse, x), "3 B")
]
CASES.update(
    {
        kind: [
            case(kind, of, "n B:n", axis="beside"),
            case(kind, of, "B n m:n", axis="beside"),
            case(kind, of, "n m B:n", axis="beside"),
        ]
        for kind, of in {"ArgMax": tf.argmax, "ArgMin": tf.argmin}.items()
    }
)
CASES.update(
    {
        kind: [
            case(kind, of, "B n:p", axis="beside"),
            case(kind, functools.partial(of, exclusive=True), "n B:p", axis="beside"),
            case(kind, functools.partial(of, reverse=True), "B n m:p", axis="beside"),
        ]
        for kind, of in {
            "Cumsum": tf.cumsum,
            "Cumprod": tf.math.cumprod,
            "CumulativeLogsumexp": tf.math.cumulative_logsumexp,
        }.items()
    }
)
CASES["ReverseV2"] = [
    case("ReverseV2", lambda x, axis: tf.reverse(x, [axis]), "B n m", axis="beside"),
    case("ReverseV2", lambda x: tf.reverse(x, [-1, 0]), "n B m"),
]
CASES["Roll"] = [
    case("Roll", lambda x, axis: tf.roll(x, 2, axis), "B n m", axis="beside"),
    case("Roll", lambda x: tf.roll(x, [1, -1], [0, -1]), "n B m"),
]
_ids = tf.constant([0, 1, 1, -1])
for _kind, _of in {
    "Sum": tf.math.unsorted_segment_sum,
    "Max": tf.math.unsorted_segment_max,
    "Min": tf.math.unsorted_segment_min,
    "Prod": tf.math.unsorted_segment_prod,
}.items():
    CASES[f"UnsortedSegment{_kind}"] = [
        case(f"UnsortedSegment{_kind}", lambda x, i, of=_of: of(x, i, 4), "B n:n", "B:i4"),
        case(f"UnsortedSegment{_kind}", lambda x, of=_of: of(x, _ids, 2), "4 B:n"),
        case(f"UnsortedSegment{_kind}", lambda x, i, of=_of: of(x, i - 1, 3), "n B m:n", "n B:i4"),
    ]


def _dense(x, w, **more):
    return raw.DenseBincount(input=x, size=5, weights=w, **more)


CASES["DenseBincount"] = [
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0])), "B:i5"),
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0])), "B n:i5"),
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0]), binary_output=True), "B n:i5"),
    case("DenseBincount", lambda x, w: _dense(x, w), "B:i5", "B"),
    case("DenseBincount", lambda x, w: _dense(x, w), "B n:i5", "B n"),
]
