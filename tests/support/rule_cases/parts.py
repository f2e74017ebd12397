"""Cases of shapes, fills, parts of tensors, and random numbers."""

import tensorflow as tf
from keras import ops
from support.rule_cases.case import case

raw = tf.raw_ops
CASES = {}


def _add(kind, function, *data, **settings):
    CASES.setdefault(kind, []).append(case(kind, function, *data, **settings))


_add("Reshape", lambda x: tf.reshape(x, [-1, ops.shape(x)[1] * ops.shape(x)[2]]), "B n m")
_add("Reshape", lambda x: tf.reshape(x, [2 * tf.shape(x)[0], ops.shape(x)[2]]), "B 2 n")
_add("Reshape", lambda x: tf.reshape(x, [ops.shape(x)[0], -1]), "n B m")
_add("Reshape", lambda x: tf.reshape(x, [-1]), "B n")
_add("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 2]), [tf.shape(x)[0], 2, 2]), "B 4")
_add("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, 1, 0), "B n m", "B:in")
_add("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, 0, 1), "n B m", "B:in")
_add("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, 1, 0), "m n B", "m:in")
_add("Transpose", lambda x: tf.transpose(x, [1, 0]) * 2.0, "B n")
_add("Transpose", lambda x: tf.transpose(x, [2, 0, 1]) * 2.0, "n B m")
_add("ExpandDims", tf.expand_dims, "B n", axis="any")
_add("ExpandDims", tf.expand_dims, "n B", axis="any")
_add("ExpandDims", tf.expand_dims, "n B m", axis="any")
_add("Squeeze", lambda x: tf.squeeze(x, [1]), "B 1 n")
_add("Squeeze", lambda x: tf.squeeze(x, [0, -1]), "1 B 1")
_add("BroadcastTo", lambda x: tf.broadcast_to(x, [2, tf.shape(x)[0], 3]), "B 1")
_add("BroadcastTo", lambda x: tf.broadcast_to(x, [tf.shape(x)[1], tf.shape(x)[1], 2]), "1 B 1")
_add("Tile", lambda x: tf.tile(x, [1, 2]), "B n")
_add("Tile", lambda x: tf.tile(x, [2, 1, 3]), "1 B 1")
_add("Tile", lambda x: tf.tile(x, [2, 1, 1]), "n B m")
_T = {"traceless": True}
_add("Fill", lambda x: x * tf.fill([tf.shape(x)[0], 2], tf.constant(3.0, tf.float64)), "B 2", **_T)
_add("Fill", lambda x: x * tf.fill([2, tf.shape(x)[1]], tf.constant(3.0, tf.float64)), "2 B", **_T)
_add(
    "Empty",
    lambda x: x * tf.raw_ops.Empty(shape=[tf.shape(x)[0], 2], dtype=tf.float64, init=True),
    "B 2",
    **_T,
)
_add("Range", lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), tf.float64), "B", **_T)
_add(
    "Range",
    lambda x: tf.reshape(x, [-1]) * tf.cast(tf.range(3 * tf.shape(x)[0]), tf.float64),
    "B 3",
    **_T,
)
_add(
    "Range",
    lambda x: tf.reshape(x, [-1]) * tf.cast(tf.range(0, 6 * tf.shape(x)[0], 2), tf.float64),
    "B 3",
    **_T,
)
_add("Const", lambda x: x * tf.constant([[1.0, 2.0]], tf.float64), "B 2", **_T)
_add("Const", lambda x: x * tf.constant([[1.0], [2.0]], tf.float64), "2 B", **_T)

_add("GatherV2", lambda x, i: tf.gather(x, i), "k n", "B m:ik")
_add("GatherV2", lambda x, i: tf.gather(x, i, axis=1), "B k", "n:ik")
_add("GatherV2", lambda x, i: tf.gather(x, i, axis=-1), "n B k", "l m:ik")
_add("GatherV2", lambda x, i: tf.gather(x, i, axis=1, batch_dims=1), "B k n", "B m:ik")
_add("GatherV2", lambda x, i: tf.gather(x, i, axis=2, batch_dims=1), "B n k", "B m:ik")
_add(
    "GatherV2",
    lambda x, i: raw.GatherV2(params=x, indices=i, axis=1, batch_dims=-1),
    "B k n",
    "B m:ik",
    has_gradient=False,
    is_compilable=False,
)
_add(
    "GatherV2",
    lambda x, i: tf.gather(x, i, axis=2, batch_dims=2),
    "2 B 4",
    "2 B 3:i4",
    whole=("Reshape",),
)
_add("GatherNd", lambda x, i: tf.gather_nd(x, i), "k k n", "B 2:ik")
_add("GatherNd", lambda x, i: tf.gather_nd(x, i), "k n", "m B 1:ik")
_add("GatherNd", lambda x: tf.gather_nd(x, [[0], [2], [0]]), "3 B")
_add("GatherNd", lambda x, i: tf.gather_nd(x, i, batch_dims=1), "B k n", "B m 1:ik")
_add("ScatterNd", lambda i, u: tf.scatter_nd(i, u, [4, tf.shape(u)[1]]), "B 1:i4", "B n")
_add("ScatterNd", lambda i, u: tf.scatter_nd(i, u, [4, 4]), "n B 2:i4", "n B")
_add("ScatterNd", lambda u: tf.scatter_nd([[0], [2], [0]], u, [3, tf.shape(u)[1]]), "3 B")
_add("ConcatV2", lambda x, y: tf.concat([x, y], 1), "B n:n", "B m:n")
_add("ConcatV2", lambda x, y: tf.concat([x, y, x], 0), "n B", "m B")
_add("ConcatV2", lambda x, y: tf.concat([x, y, x], -1), "n B m", "n B k")
_add("Pack", lambda x, y, axis: tf.stack([x, y], axis), "B n:n", "B n:n", axis="any")
_add("Pack", lambda x, y: tf.stack([x, y], -1), "n B", "n B")
_add("Unpack", lambda x: tf.unstack(x, axis=-1), "B n")
_add("Unpack", lambda x: tf.unstack(x, axis=0), "n B m")
_add("Split", lambda x: tf.split(x, 2, -1), "B 2n")
_add("Split", lambda x: tf.split(x, 2, 0), "2n B m")
_add("SplitV", lambda x: tf.split(x, [1, -1], -1), "B n+1")
_add("SplitV", lambda x: tf.split(x, [1, -1], 0), "n+1 B")
_add("Pad", lambda x: tf.pad(x, [[0, 0], [1, 2]]), "B n")
_add("Pad", lambda x: tf.pad(x, [[1, 0], [0, 0], [0, 2]]), "n B m")
_add("PadV2", lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=2.0), "B n")
_add("MirrorPad", lambda x: tf.pad(x, [[0, 0], [1, 2]], "REFLECT"), "B n+2")
_add("MirrorPad", lambda x: tf.pad(x, [[1, 1], [0, 0]], "SYMMETRIC"), "n B")
_add(
    "MirrorPadGrad",
    lambda x: raw.MirrorPadGrad(input=x, paddings=[[0, 0], [1, 1]], mode="REFLECT"),
    "B 4",
    is_compilable=True,
)
_add("Slice", lambda x: tf.slice(x, [0, 1], [-1, 2]), "B n+2")
_add("Slice", lambda x: tf.slice(x, [0, 1], [tf.shape(x)[0], -1]), "B n")
_add("Slice", lambda x: tf.slice(x, [1, 0, 0], [1, -1, 2]), "n+1 B m+1")
_add("StridedSlice", lambda x: x[:, 1], "B n+1")
_add("StridedSlice", lambda x: x[..., 1:], "B n")
_add("StridedSlice", lambda x: x[:, ::-1], "B n")
_add("StridedSlice", lambda x: x[:, -2:, tf.newaxis], "B n m")
_add("StridedSlice", lambda x: x[1, ..., ::2], "n+1 B m k")
_add("StridedSlice", lambda x: x[tf.newaxis, ..., 0], "B n m")
_add("StridedSlice", lambda x: x[:, ..., tf.newaxis], "n B")
_add("StridedSlice", lambda x: x[: tf.shape(x)[0], 1:], "B n")
_add("StridedSlice", lambda x: x[1:, :, 2:0:-1], "n B m")
_add(
    "StridedSliceGrad",
    lambda g: raw.StridedSliceGrad(
        shape=[tf.shape(g)[0], 3],
        begin=[0, 1],
        end=[0, 3],
        strides=[1, 1],
        dy=g,
        begin_mask=1,
        end_mask=1,
    ),
    "B 2",
)
_add(
    "StridedSliceGrad",
    lambda g: raw.StridedSliceGrad(
        shape=[2, tf.shape(g)[0]],
        begin=[1, 0],
        end=[2, 0],
        strides=[1, 1],
        dy=g,
        begin_mask=2,
        end_mask=2,
        shrink_axis_mask=1,
    ),
    "B",
)
_add("OneHot", lambda x: tf.one_hot(x, 3, dtype=tf.float64), "B:i4")
_add("OneHot", lambda x: tf.one_hot(x, 3, axis=0, dtype=tf.float64), "n B:i4")
_add("OneHot", lambda x: tf.one_hot(x, 2, axis=1, dtype=tf.float64), "B n:i4")
for _side in ("Lower", "Upper"):
    _of = getattr(raw, f"{_side}Bound")
    _add(
        f"{_side}Bound",
        lambda x, y, of=_of: of(sorted_inputs=tf.sort(x), values=y),
        "B n:n",
        "B m:n",
        is_compilable=_side == "Lower" and False,
    )
_add(
    "Bucketize", lambda x: raw.Bucketize(input=x, boundaries=[-0.5, 0.5]), "B n", is_compilable=True
)
_add(
    "Bucketize", lambda x: raw.Bucketize(input=x, boundaries=[-0.5, 0.5]), "n B", is_compilable=True
)
for _kind, _of in {
    "Update": tf.tensor_scatter_nd_update,
    "Add": tf.tensor_scatter_nd_add,
    "Sub": tf.tensor_scatter_nd_sub,
    "Max": tf.tensor_scatter_nd_max,
    "Min": tf.tensor_scatter_nd_min,
}.items():
    _add(f"TensorScatter{_kind}", lambda x, u, of=_of: of(x, [[0], [2]], u), "n+2 B", "2 B")
    _add(f"TensorScatter{_kind}", lambda x, u, of=_of: of(x, [[0, 1]], u), "n m+1 B", "1 B")

for _kind, _of in {"Add": tf.tensor_scatter_nd_add, "Sub": tf.tensor_scatter_nd_sub}.items():
    _add(
        f"TensorScatter{_kind}", lambda x, i, u, of=_of: of(x, i[:, None], u), "k n", "B:ik", "B n"
    )
    _add(f"TensorScatter{_kind}", lambda i, u, of=_of: of(tf.ones(4), i[:, None], u), "B:i4", "B:f")

_SEED = [1, 2]


def _normal(shape):
    return tf.random.stateless_normal(shape, _SEED, dtype=tf.float64)


for _kind, _of in {
    "StatelessRandomUniformV2": lambda shape: tf.random.stateless_uniform(
        shape, _SEED, dtype=tf.float64
    ),
    "StatelessRandomNormalV2": _normal,
    "StatelessTruncatedNormalV2": lambda shape: tf.random.stateless_truncated_normal(
        shape, _SEED, dtype=tf.float64
    ),
    "StatelessRandomUniformIntV2": lambda shape: tf.cast(
        tf.random.stateless_uniform(shape, _SEED, 0, 99, tf.int32), tf.float64
    ),
    "StatelessRandomUniformFullIntV2": lambda shape: tf.cast(
        tf.random.stateless_uniform(shape, _SEED, None, None, tf.int32), tf.float64
    ),
}.items():
    _add(_kind, lambda x, of=_of: x * of(tf.shape(x)), "B n", **_T)
    _add(_kind, lambda x, of=_of: x * of([tf.shape(x)[0], 1, 5]), "B n 1", **_T)
_add(
    "StatelessRandomUniformV2",
    lambda x: x * tf.random.stateless_uniform(tf.shape(x), _SEED),
    "B n:f",
    traceless=True,
    tolerance=1e-6,
)
_add(
    "StatelessRandomNormalV2",
    lambda x: x * tf.random.stateless_normal(tf.shape(x), _SEED),
    "B n:f",
    traceless=True,
    tolerance=1e-6,
)
_add("StatelessRandomGetAlg", lambda x: x * _normal(tf.shape(x)), "B n", **_T)
