"""Cases of contractions, reductions, and what runs along an axis."""

import tensorflow as tf
from support.rule_cases.case import case

raw = tf.raw_ops
REDUCTIONS = {"Sum": "", "Mean": "", "Max": "", "Min": "", "Prod": ":p", "Any": ":b", "All": ":b"}


def _reductions(kind, letter):
    of = getattr(tf, f"reduce_{kind.lower()}")
    has = {"whole": ("Cumprod",)} if kind == "Prod" else {}
    yield case(kind, lambda x: of(x, 0), f"B 3{letter}", **has)
    yield case(kind, lambda x: of(x, -1), f"B 3{letter}", **has)
    yield case(kind, lambda x: of(x, [0, -1], keepdims=True), f"2 B 2{letter}", **has)
    yield case(kind, lambda x: of(x, [-2, 0]), f"2 B 2{letter}", **has)
    yield case(kind, lambda x: of(x), f"B 2{letter}", **has)
    yield case(kind, lambda x: of(x, 1, keepdims=True), f"B 2 1{letter}", **has)
    yield case(kind, lambda x: of(x, 0), f"B{letter}", **has)


CASES = {kind: list(_reductions(kind, letter)) for kind, letter in REDUCTIONS.items()}
CASES["Mean"] += [
    case("Mean", lambda x: tf.reduce_mean(x, 1), "B 4:i9"),
    case("Mean", lambda x: tf.reduce_mean(x, 0), "B 4:h", tolerance=2e-3),
]


def _matmul(**settings):
    return lambda a, b: tf.matmul(a, b, **settings)


def _batch(version, **settings):
    if version == "BatchMatMulV3":
        return lambda a, b: raw.BatchMatMulV3(x=a, y=b, Tout=tf.float64, **settings)
    return lambda a, b: getattr(raw, version)(x=a, y=b, **settings)


CASES["MatMul"] = [
    case("MatMul", _matmul(), "B 4", "4 5"),
    case("MatMul", _matmul(), "3 B", "B 2"),
    case("MatMul", _matmul(), "2 4", "4 B"),
    case("MatMul", _matmul(transpose_a=True), "B 4", "B 2"),
    case("MatMul", _matmul(transpose_b=True), "B 2", "2 2"),
    case("MatMul", _matmul(transpose_a=True, transpose_b=True), "2 B", "3 2"),
    case("MatMul", lambda a: tf.matmul(a, a, transpose_b=True), "B 4", whole=("Transpose",)),
    case("MatMul", lambda a: tf.matmul(a, a, transpose_a=True), "B 2"),
]
for _version in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
    CASES[_version] = [
        case(_version, _batch(_version), "B 2 3", "B 3 2", has_gradient=_version[-1] == "2"),
        case(
            _version,
            _batch(_version, adj_x=True),
            "2 B 3",
            "2 B 2",
            has_gradient=_version[-1] == "2",
        ),
        case(
            _version,
            _batch(_version, adj_y=True),
            "2 B 3",
            "2 2 3",
            has_gradient=_version[-1] == "2",
        ),
    ]
for _version in ("BatchMatMulV2", "BatchMatMulV3"):
    CASES[_version] += [
        case(_version, _batch(_version), "B 2 3", "3 2", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "B 1 2 3", "2 3 4", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "2 1 2 3", "B 3 4", has_gradient=_version[-1] == "2"),
        case(_version, _batch(_version), "2 2 B", "B 3", has_gradient=_version[-1] == "2"),
    ]
CASES["Einsum"] = [
    case("Einsum", lambda x, w: tf.einsum("bij,jk->bik", x, w), "B 2 3", "3 2"),
    case("Einsum", lambda x, y: tf.einsum("bij,bkj->bik", x, y), "B 2 3", "B 2 3"),
    case("Einsum", lambda x, y: tf.einsum("ib,bj->ij", x, y), "2 B", "B 2"),
    case("Einsum", lambda x: tf.einsum("bij->jb", x), "B 2 2"),
    case("Einsum", lambda x, w: tf.einsum("...x,xy->...y", x, w), "B 4 3", "3 2"),
    case("Einsum", lambda x, y: tf.einsum("...ij,...jk->...ik", x, y), "B 2 2 3", "1 3 2"),
    case("Einsum", lambda x: tf.einsum("i...->...i", x), "2 B 3"),
]
CASES["L2Loss"] = [case("L2Loss", tf.nn.l2_loss, "B 3"), case("L2Loss", tf.nn.l2_loss, "2 B 2")]
CASES["Cross"] = [
    case("Cross", tf.linalg.cross, "B 3", "B 3"),
    case("Cross", tf.linalg.cross, "2 B 3", "2 B 3"),
]
_sparse = tf.sparse.from_dense(tf.constant([[0.0, 2.0, 3.0], [1.0, 0.0, 0.0]], tf.float64))
CASES["SparseTensorDenseMatMul"] = [
    case("SparseTensorDenseMatMul", lambda x: tf.sparse.sparse_dense_matmul(_sparse, x), "3 B")
]
CASES.update(
    {
        kind: [
            case(kind, lambda x, of=of: of(x, 0), "3 B"),
            case(kind, lambda x, of=of: of(x, -1), "B 2 2"),
            case(kind, lambda x, of=of: of(x, 1), "B 2 2"),
        ]
        for kind, of in {"ArgMax": tf.argmax, "ArgMin": tf.argmin}.items()
    }
)
CASES.update(
    {
        kind: [
            case(kind, lambda x, of=of: of(x, 1), "B 3:p"),
            case(kind, lambda x, of=of: of(x, -2, exclusive=True), "2 B:p"),
            case(kind, lambda x, of=of: of(x, -1, reverse=True), "B 2 2:p"),
        ]
        for kind, of in {
            "Cumsum": tf.cumsum,
            "Cumprod": tf.math.cumprod,
            "CumulativeLogsumexp": tf.math.cumulative_logsumexp,
        }.items()
    }
)
CASES["ReverseV2"] = [
    case("ReverseV2", lambda x: tf.reverse(x, [1]), "B 3"),
    case("ReverseV2", lambda x: tf.reverse(x, [-1, 0]), "2 B 2"),
]
CASES["Roll"] = [
    case("Roll", lambda x: tf.roll(x, 1, 1), "B 3"),
    case("Roll", lambda x: tf.roll(x, [1, -1], [0, -1]), "2 B 2"),
]
_ids = tf.constant([0, 1, 1, -1])
for _kind, _of in {
    "Sum": tf.math.unsorted_segment_sum,
    "Max": tf.math.unsorted_segment_max,
    "Min": tf.math.unsorted_segment_min,
    "Prod": tf.math.unsorted_segment_prod,
}.items():
    CASES[f"UnsortedSegment{_kind}"] = [
        case(f"UnsortedSegment{_kind}", lambda x, i, of=_of: of(x, i, 4), "B 2", "B:i4"),
        case(f"UnsortedSegment{_kind}", lambda x, of=_of: of(x, _ids, 2), "4 B"),
        case(f"UnsortedSegment{_kind}", lambda x, i, of=_of: of(x, i - 1, 3), "2 B 3", "2 B:i4"),
    ]


def _dense(x, w, **more):
    return raw.DenseBincount(input=x, size=5, weights=w, **more)


CASES["DenseBincount"] = [
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0])), "B:i5"),
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0])), "B 3:i5"),
    case("DenseBincount", lambda x: _dense(x, tf.zeros([0]), binary_output=True), "B 3:i5"),
    case("DenseBincount", lambda x, w: _dense(x, w), "B:i5", "B"),
    case("DenseBincount", lambda x, w: _dense(x, w), "B 3:i5", "B 3"),
]
