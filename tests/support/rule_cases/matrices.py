"""Cases of operations on the last axes: softmax, sorting, transforms, matrices."""

import tensorflow as tf
from support.rule_cases.case import case

raw = tf.raw_ops
CASES = {}


def _add(kind, function, *data, **settings):
    CASES.setdefault(kind, []).append(case(kind, function, *data, **settings))


def _of_pairs(x):
    """Numbers for each pair of rows."""
    return tf.matmul(tf.sin(x), x, transpose_b=True)


_add("Softmax", lambda x: tf.nn.softmax(x), "B n")
_add("Softmax", lambda x: tf.nn.softmax(x), "n B m")
_add("LogSoftmax", lambda x: tf.nn.log_softmax(x), "B n")
_add("TopKV2", lambda x: list(tf.math.top_k(x, 2)), "B n+1:n", whole=("Reshape",))
_add("TopKV2", lambda x: list(tf.math.top_k(x, 2)), "n B m+1:n", whole=("Reshape",))
for _n, _drawn, _size in ((1, "i", "4"), (2, "i j", "2 4"), (3, "i j k", "2 2 4")):
    _name = "" if _n == 1 else f"{_n}D"
    for _kind in (f"FFT{_name}", f"IFFT{_name}"):
        _add(_kind, lambda x, kind=_kind: getattr(raw, kind)(input=x), f"B {_drawn}:c")
        _add(_kind, lambda x, kind=_kind: getattr(raw, kind)(input=x), f"n B {_drawn}:c")
    _length = [int(one) for one in _size.split()]
    _add(
        f"RFFT{_name}",
        lambda x, n=_name, k=_length: getattr(raw, f"RFFT{n}")(
            input=x, fft_length=k, Tcomplex=tf.complex128
        ),
        f"B {_size}",
    )
    _add(
        f"IRFFT{_name}",
        lambda x, n=_name, k=_length: getattr(raw, f"IRFFT{n}")(
            input=x, fft_length=k, Treal=tf.float64
        ),
        f"B {_size}:c",
    )
    _add(
        f"RFFT{_name}",
        lambda x, n=_name, k=_length: getattr(raw, f"RFFT{n}")(
            input=x, fft_length=k, Tcomplex=tf.complex128
        ),
        f"1 B {_size}",
    )


def _square(x):
    return tf.matmul(x, x, transpose_b=True) + tf.eye(tf.shape(x)[-2], dtype=x.dtype)


_M = {"is_compilable": False}
_add("Cholesky", lambda x: tf.linalg.cholesky(_square(x)), "B n n")
_add(
    "CholeskyGrad",
    lambda x, g: raw.CholeskyGrad(l=tf.linalg.cholesky(_square(x)), grad=g),
    "B n n",
    "B n n",
    has_gradient=False,
    **_M,
)
_add("LogMatrixDeterminant", lambda x: list(tf.linalg.slogdet(_square(x))), "B n n", **_M)
_add("MatrixDeterminant", lambda x: tf.linalg.det(_square(x)), "B n n", **_M)
_add("MatrixInverse", lambda x: tf.linalg.inv(_square(x)), "B n n")
_add("MatrixSolve", lambda x, y: tf.linalg.solve(_square(x), y), "n B k k", "n B k m")
_add("MatrixSolve", lambda x, y: tf.linalg.solve(_square(x), y), "n n", "n B")
_add("MatrixTriangularSolve", lambda x, y: tf.linalg.triangular_solve(_square(x), y), "n n", "n B")


def _tridiagonal(x, y):
    return tf.linalg.tridiagonal_solve(tf.stack([x, 9.0 + x, x], -2), y)


_add("TridiagonalSolve", _tridiagonal, "B n+1", "B n+1 m", is_compilable=False)
_add("TridiagonalSolve", _tridiagonal, "n+1", "n+1 B", is_compilable=False)
_add(
    "MatrixTriangularSolve",
    lambda x, y: tf.linalg.triangular_solve(_square(x), y),
    "B n n",
    "B n m",
)
_add("Qr", lambda x: [one**2 for one in tf.linalg.qr(x)], "B n+1 n", tolerance=1e-8, **_M)
_add(
    "Svd",
    lambda x: tf.linalg.svd(x).s if hasattr(tf.linalg.svd(x), "s") else tf.linalg.svd(x)[0],
    "B n+1 n",
    tolerance=1e-8,
    **_M,
)
_add("SelfAdjointEigV2", lambda x: tf.linalg.eigh(_square(x))[0], "B n n", tolerance=1e-8, **_M)
_add("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), "B n m")
_add("MatrixBandPart", lambda x: tf.linalg.band_part(x, 0, -1), "n B m k")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(x), "B n m")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(x, k=(-1, 0)), "B n+1 m")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(_of_pairs(x)), "B n")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(tf.transpose(_of_pairs(x))), "B n")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x[:, 0]) @ x, "B n")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x[:, 0], padding_value=2.0), "B n")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x), "B n")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x, k=(0, 1)), "B 2 n")
_add("MatrixSetDiagV3", lambda x, y: tf.linalg.set_diag(x, y), "B n+2 2", "B 2", has_gradient=False)
_add("MatrixSetDiagV3", lambda x: tf.linalg.set_diag(_of_pairs(x), x[:, 1]), "B n+1")
_add("MatrixSetDiagV3", lambda x: tf.linalg.set_diag(tf.transpose(_of_pairs(x)), x[:, 1]), "B n+1")
_add(
    "MatrixSetDiagV3",
    lambda x, y: tf.linalg.set_diag(x, y, k=-1),
    "n B m+1 m+1",
    "n B m",
    has_gradient=False,
)
_add(
    "MatrixSetDiagV3",
    lambda x: tf.linalg.set_diag(x, tf.ones([tf.shape(x)[0], 2], x.dtype)),
    "B 2 2",
    has_gradient=False,
)
_add(
    "MatrixLogarithm",
    lambda x: tf.math.real(tf.linalg.logm(tf.cast(_square(x), tf.complex128))),
    "B n n",
    tolerance=1e-8,
)
_add("MatrixSquareRoot", lambda x: tf.linalg.sqrtm(_square(x)), "B n n", tolerance=1e-8)
_add("Eig", lambda x: tf.abs(tf.linalg.eig(x)[0]), "B n n", has_gradient=False, tolerance=1e-8)
_add("Lu", lambda x: list(tf.linalg.lu(_square(x))), "B n n", has_gradient=False)
