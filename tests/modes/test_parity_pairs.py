"""Models x optimizers x heads x inputs: pairs of them in a training, against one device.

On TensorFlow every pair of two of them; on JAX every pair of models, heads and inputs.

Weights, the optimizer's slots, logs, metrics and other state are compared, in float64.
"""

import itertools

import keras
import pytest
from support.fuzz import compare, program, run
from support.fuzz.case import Case, Head, Make, Part, Source
from support.precision import double_precision

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
_VECTORS, _TOKENS, _IMAGES = "rows, 6", "rows, 5", "rows, 6, 6, 2"


def _part(name, *given, form="{0}(x)", **named):
    return Part((Make(name, (*(("", text) for text in given), *named.items())),), form)


_EMBEDDING = _part("layers.Embedding", "12", "4", embeddings_initializer="'normal'")
_MASKING = _part("layers.Embedding", "12", "4", embeddings_initializer="'normal'", mask_zero="True")
_MEAN = _part("layers.GlobalAveragePooling1D")
_MASKED_MEAN = "lambda x, m: 10 * ops.sum(x * x * m) / (ops.sum(m) + 1)"
_DENSE = _part("layers.Dense", "4", activation="'tanh'")

# Without the bias of its keys, whose gradient is nothing but rounding.
_ATTENTION = _part("layers.MultiHeadAttention", "2", "2", form="x + {0}(x, x)", use_bias="False")

# The shape of the inputs, how the model is wired, and its layers.
MODELS = {
    "mlp": (_VECTORS, "lazy", (_DENSE, _part("layers.LayerNormalization"))),
    "shared_twice": (
        _VECTORS,
        "functional",
        (_part("layers.Dense", "6", activation="'relu'", form="{0}(x) + {0}(2 * x)"),),
    ),
    "positions": (_TOKENS, "functional", (_EMBEDDING, _part("Positions"), _MEAN)),
    "fixed_rows": (_VECTORS, "subclassed", (_part("Rows"), _DENSE)),
    "tied_embedding": (_TOKENS, "functional", (_part("Shared"), _MEAN)),
    "convolution": (
        _IMAGES,
        "nested",
        (_part("layers.Conv2D", "3", "3", activation="'elu'"), _part("layers.Flatten")),
    ),
    "masked_gru": (_TOKENS, "functional", (_MASKING, _part("layers.GRU", "3"))),
    "attention": (_TOKENS, "subclassed", (_EMBEDDING, _ATTENTION, _MEAN)),
    "batch_normalization": (
        _VECTORS,
        "functional",
        (_DENSE, _part("layers.BatchNormalization", momentum="0.5")),
    ),
    "mean_of_squares": (
        _VECTORS,
        "functional",
        (_DENSE, _part("AddsLoss", "lambda x, m: ops.mean(ops.square(x))"), _DENSE),
    ),
    "masked_loss": (_TOKENS, "functional", (_MASKING, _part("AddsLoss", _MASKED_MEAN), _MEAN)),
    "counter": (_VECTORS, "functional", (_part("Keeps", "lambda v, x: v + 1"), _DENSE)),
}
OPTIMIZERS = {
    "momentum": Make("keras.optimizers.SGD", (("", "0.1"), ("momentum", "0.9"))),
    "adam": Make("keras.optimizers.Adam", (("", "0.02"), ("amsgrad", "True"))),
    "rmsprop": Make("keras.optimizers.RMSprop", (("", "0.02"), ("momentum", "0.9"))),
    "adagrad": Make("keras.optimizers.Adagrad", (("", "0.1"), ("use_ema", "True"))),
    "clipped": Make("keras.optimizers.AdamW", (("", "0.02"), ("global_clipnorm", "0.1"))),
    "accumulated": Make(
        "keras.optimizers.Nadam", (("", "0.02"), ("gradient_accumulation_steps", "2"))
    ),
    "adafactor": Make("keras.optimizers.Adafactor", (("", "0.05"),)),
    "ftrl": Make("keras.optimizers.Ftrl", (("", "0.1"), ("l1_regularization_strength", "0.01"))),
}
_LABELS = "rng.integers(0, 3, size=(rows,))"
_SPARSE = "keras.losses.SparseCategoricalCrossentropy"
_ACCURACY = Make("keras.metrics.SparseCategoricalAccuracy")
HEADS = {
    "linear": (
        Head(
            (_part("layers.Dense", "2"),),
            "rng.normal(size=(rows, 2))",
            Make("keras.losses.Huber"),
            (Make("keras.metrics.R2Score"),),
        ),
    ),
    "softmax": (
        Head(
            (_part("layers.Dense", "3", activation="'softmax'"),),
            _LABELS,
            Make(_SPARSE),
            (_ACCURACY,),
        ),
    ),
    "softmax_layer": (
        Head(
            (_part("layers.Dense", "3"), _part("layers.Softmax")),
            f"np.eye(3)[{_LABELS}]",
            Make("keras.losses.CategoricalCrossentropy", (("label_smoothing", "0.1"),)),
            (Make("keras.metrics.F1Score"),),
        ),
    ),
    "sigmoid": (
        Head(
            (_part("layers.Dense", "1", activation="'sigmoid'"),),
            "rng.integers(0, 2, size=(rows, 1))",
            Make("keras.losses.BinaryCrossentropy"),
            (Make("keras.metrics.AUC"),),
        ),
    ),
    "logits": (
        Head(
            (_part("layers.Dense", "3"),),
            _LABELS,
            Make(_SPARSE, (("from_logits", "True"), ("reduction", "'sum'"))),
            (_ACCURACY,),
        ),
    ),
}
HEADS["two"] = (*HEADS["linear"], *HEADS["softmax"])
# Values of floats and of tokens.
INPUTS = {
    "normal": ("rng.normal(size=({}))", "rng.integers(0, 12, size=({}))"),
    "large": ("rng.normal(size=({})) * 100", "rng.integers(10, 12, size=({}))"),
    "small": ("rng.normal(size=({})) * 1e-3", "rng.integers(1, 3, size=({}))"),
    "skewed": ("np.exp(2 * rng.normal(size=({})))", "rng.integers(0, 12, size=({})) ** 2 // 11"),
    "repeated": (
        "np.repeat(rng.normal(size=({}))[:1], rows, axis=0)",
        "np.repeat(rng.integers(0, 12, size=({}))[:1], rows, axis=0)",
    ),
    "with_holes": (
        "rng.normal(size=({0})) * (rng.random(size=({0})) < 0.3)",
        "rng.integers(1, 12, size=({0})) * (np.arange(5) < rng.integers(0, 4, size=(rows, 1)))",
    ),
}
_SYMBOLS = {
    _VECTORS: "keras.Input((6,))",
    _TOKENS: "keras.Input((5,), dtype='int32')",
    _IMAGES: "keras.Input((6, 6, 2))",
}


def covering(*columns):
    """Rows in which every two values of two columns meet: greedily, so not the fewest."""
    places = list(itertools.combinations(range(len(columns)), 2))
    missing = {(a, b, x, y) for a, b in places for x in columns[a] for y in columns[b]}
    rows = []
    while missing:
        a, b, x, y = min(missing)
        row = {a: x, b: y}
        for place in range(len(columns)):
            if place not in row:
                row[place] = max(
                    columns[place], key=lambda value: len(missing & _met({**row, place: value}))
                )
        missing -= _met(row)
        rows.append(tuple(row[place] for place in range(len(columns))))
    return rows


def _met(row):
    return {(a, b, row[a], row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def _table():
    """On JAX no pairs of models and optimizers: it spreads one program, whatever is in it."""
    models, optimizers, heads, inputs = map(list, (MODELS, OPTIMIZERS, HEADS, INPUTS))
    if _ON_TENSORFLOW:
        return covering(models, optimizers, heads, inputs)
    rows = covering(models, heads, inputs)
    return [
        (model, optimizers[number % len(optimizers)], head, values)
        for number, (model, head, values) in enumerate(rows)
    ]


TABLE = _table()


def make_case(model, optimizer, head, values):
    """The case of a row of the table: with uneven batches, the last one of a single row."""
    size, wiring, trunk = MODELS[model]
    heads = HEADS[head]
    data = INPUTS[values][size == _TOKENS].format(size)
    number = TABLE.index((model, optimizer, head, values))
    # JAX compiles each operation that runs alone, so few cases run eagerly there.
    is_eager = number % 3 > 0 if _ON_TENSORFLOW else number % 24 == 0
    # With EMA, plain Keras can't evaluate what JAX has compiled for training.
    evaluates = number % 3 > 0 and (is_eager or "use_ema" not in str(OPTIMIZERS[optimizer]))
    return Case(
        "-".join((model, optimizer, head, values)),
        (Source(_SYMBOLS[size], data),),
        "i",
        trunk,
        heads,
        wiring="functional" if wiring == "lazy" and len(heads) > 1 else wiring,
        outputs="list" if len(heads) > 1 else "single",
        optimizer=OPTIMIZERS[optimizer],
        settings=(("run_eagerly", "True"),)
        if is_eager
        else (("jit_compile", str(not _ON_TENSORFLOW)),),
        actions=("fit", "evaluate") if evaluates else ("fit",),
        rows=9,
        batch=4,
        n=(2, 3)[number % 2],
        options=((("shard", "'weights'"),) if number % 3 == 0 else ()),
    )


@pytest.fixture
def _double_precision(monkeypatch):
    if not _ON_TENSORFLOW:  # where Keras computes losses in float32 even so
        monkeypatch.setitem(compare.CLOSE, "float64", 1e-6)
        monkeypatch.setitem(compare.TINY, "float64", 5e-7)
    with double_precision():
        yield


def test_every_pair_is_in_the_table():
    columns = (MODELS, OPTIMIZERS, HEADS, INPUTS)
    covered = range(4) if _ON_TENSORFLOW else (0, 2, 3)
    for a, b in itertools.combinations(covered, 2):
        assert {(row[a], row[b]) for row in TABLE} == set(itertools.product(columns[a], columns[b]))
    assert {row[1] for row in TABLE} == set(OPTIMIZERS)
    assert len(TABLE) < 110


@pytest.mark.thin(33)
@pytest.mark.usefixtures("_double_precision")
@pytest.mark.parametrize("row", TABLE, ids="-".join)
def test_one_device_and_several(row):
    case = make_case(*row)
    outcome = run.run(case)
    right = [run.EQUAL]
    if row[0] == "batch_normalization" and not _ON_TENSORFLOW:
        right.append(run.NOISE)  # it divides by tiny variances, and the loss has float32's rounding
    assert outcome.kind in right, program.script(case, f"{outcome.kind}: {outcome.detail}")
    assert outcome.finite
    assert not [text for text in outcome.warned if "runs eagerly" not in text]
