"""Heads: the last layers, targets for them, and the losses and metrics that fit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import keras

from . import values
from .case import Head, Make, Part

_REAL, _BINARY, _CLASSES, _ONE_HOT = "real", "binary", "classes", "one_hot"
_FAMILIES = {
    "BinaryCrossentropy": (_BINARY,),
    "BinaryFocalCrossentropy": (_BINARY,),
    "BinaryAccuracy": (_BINARY,),
    "BinaryIoU": (_BINARY,),
    "AUC": (_BINARY,),
    "Accuracy": (_BINARY,),
    "CTC": (),  # drawn by `_ctc`
    "CategoricalAccuracy": (_ONE_HOT,),
    "CategoricalCrossentropy": (_ONE_HOT,),
    "CategoricalFocalCrossentropy": (_ONE_HOT,),
    "CategoricalGeneralizedCrossEntropy": (_CLASSES,),
    "CategoricalHinge": (_ONE_HOT,),
    "Circle": (_CLASSES,),
    "Dice": (_BINARY, _ONE_HOT),
    "F1Score": (_ONE_HOT,),
    "FBetaScore": (_ONE_HOT,),
    "FalseNegatives": (_BINARY,),
    "FalsePositives": (_BINARY,),
    "Hinge": (_BINARY,),
    "IoU": (),
    "KLDivergence": (_ONE_HOT,),
    "MeanIoU": (),
    "OneHotIoU": (_ONE_HOT,),
    "OneHotMeanIoU": (_ONE_HOT,),
    "Precision": (_BINARY, _ONE_HOT),
    "PrecisionAtRecall": (_BINARY,),
    "Recall": (_BINARY, _ONE_HOT),
    "RecallAtPrecision": (_BINARY,),
    "SensitivityAtSpecificity": (_BINARY,),
    "SparseCategoricalAccuracy": (_CLASSES,),
    "SparseCategoricalCrossentropy": (_CLASSES,),
    "SparseTopKCategoricalAccuracy": (_CLASSES,),
    "SpecificityAtSensitivity": (_BINARY,),
    "SquaredHinge": (_BINARY,),
    "TopKCategoricalAccuracy": (_ONE_HOT,),
    "TrueNegatives": (_BINARY,),
    "TruePositives": (_BINARY,),
    "Tversky": (_BINARY, _ONE_HOT),
}
NO_METRICS = {
    "Metric": "the base class",
    "MeanMetricWrapper": "needs a function: all the functions have classes",
    "Mean": "of one value: drawn by every loss",
    "Sum": "of one value: drawn by every mean",
    "IoU": "of labels that a model can't give with a gradient",
    "MeanIoU": "of labels that a model can't give with a gradient",
}
values.IN_CLASS.update(
    {
        "AUC.curve": ["'ROC'", "'PR'"],
        "AUC.thresholds": ["None", "[0.3, 0.6]"],
        "AUC.num_thresholds": ["7", "200"],
        "AUC.from_logits": values.FLAGS,
        "BinaryFocalCrossentropy.apply_class_balancing": values.FLAGS,
        "BinaryIoU.target_class_ids": ["(0, 1)", "(1,)"],
        "F1Score.average": ["'macro'", "'micro'", "'weighted'", "None"],
        "FBetaScore.average": ["'macro'", "'micro'", "None"],
        "F1Score.threshold": ["None", "0.4"],
        "OneHotIoU.num_classes": ["3"],
        "OneHotIoU.target_class_ids": ["(0, 2)"],
        "OneHotMeanIoU.num_classes": ["3"],
        "Precision.thresholds": ["0.3", "[0.2, 0.8]"],
        "Recall.thresholds": ["0.3", "[0.2, 0.8]"],
        "R2Score.class_aggregation": ["'uniform_average'", "None", "'variance_weighted_average'"],
        "SparseTopKCategoricalAccuracy.k": ["1", "2"],
        "TopKCategoricalAccuracy.k": ["1", "2"],
        "Circle.gamma": ["2.0"],
        "Huber.delta": ["0.3"],
        "Dice.axis": ["None", "(1,)"],
        "Tversky.axis": ["None", "(1,)"],
    }
)
values.BY_NAME.update(
    {
        "from_logits": values.FLAGS,
        "gamma": ["1.0", "2.0"],
        "ignore_class": ["0", "None"],
        "label_smoothing": ["0.1"],
        "num_thresholds": ["20"],
        "precision": ["0.5"],
        "q": ["0.3"],
        "recall": ["0.5"],
        "reduction": ["'sum'", "'mean'", "'mean_with_sample_weight'", "'sum_over_batch_size'"],
        "sensitivity": ["0.5"],
        "specificity": ["0.5"],
        "thresholds": ["0.3"],
    }
)


def draw_head(rng: random.Random, shape: Sequence[int | None]) -> Head:
    """A head for a tensor of floats of this shape; sequences get targets for all places."""
    if len(shape) == 3 and rng.random() < 0.1:
        return _ctc()
    family = rng.choice([_REAL, _REAL, _BINARY, _CLASSES, _CLASSES, _ONE_HOT])
    width = {_REAL: 2, _BINARY: rng.choice([1, 3])}.get(family, 3)
    places = "".join(f", {length}" for length in shape[1:-1])
    target = {
        _REAL: f"rng.normal(size=(rows{places}, {width}))",
        _BINARY: f"rng.integers(0, 2, size=(rows{places}, {width}))",
        _CLASSES: f"rng.integers(0, 3, size=(rows{places or ''},))",
        _ONE_HOT: f"np.eye(3)[rng.integers(0, 3, size=(rows{places or ''},))]",
    }[family]
    parts, is_logits = _last(rng, family, width)
    loss = _draw(rng, family, keras.losses, is_logits)
    while places and loss.name.endswith("Circle"):  # compares rows, not places
        loss = _draw(rng, family, keras.losses, is_logits)
    count = rng.choice([0, 0, 1, 2])
    metrics = [_draw(rng, family, keras.metrics, is_logits) for _ in range(count)]
    weighted = [_draw(rng, family, keras.metrics, is_logits)] if rng.random() < 0.15 else []
    return Head(parts, target, loss, tuple(metrics), tuple(weighted))


def _last(rng: random.Random, family: str, width: int) -> tuple[tuple[Part, ...], bool]:
    """The last layers, and whether their outputs are logits."""
    activation = {_BINARY: "'sigmoid'", _CLASSES: "'softmax'", _ONE_HOT: "'softmax'"}.get(family)
    dense = Make("layers.Dense", (("", str(width)),))
    if activation is None or rng.random() < 0.3:
        return (Part((dense,)),), True
    how = rng.choice(["inside", "inside", "layer", "own"])
    if how == "inside":
        dense = Make("layers.Dense", (*dense.arguments, ("activation", activation)))
        return (Part((dense,)),), False
    last = Make("layers.Activation", (("", activation),))
    if family != _BINARY and how == "own":
        last = Make("layers.Softmax")
    return (Part((dense,)), Part((last,))), False


def _ctc() -> Head:
    dense = Make("layers.Dense", (("", "4"),))
    return Head((Part((dense,)),), "rng.integers(1, 4, size=(rows, 2))", Make("keras.losses.CTC"))


def names(module: object, family: str) -> list[str]:
    """The losses or metrics for a family of targets; for all that compare numbers, if unknown."""
    base = keras.Loss if module is keras.losses else keras.Metric
    found = [name for name in values.classes(module, base) if name not in NO_METRICS]
    return [name for name in found if family in _FAMILIES.get(name, (_REAL,))]


def _draw(rng: random.Random, family: str, module: object, is_logits: bool) -> Make:
    base = keras.Loss if module is keras.losses else keras.Metric
    name = rng.choice(names(module, family))
    prefix = "keras.losses" if module is keras.losses else "keras.metrics"
    make = values.draw(rng, values.classes(module, base)[name], prefix)
    takes = "from_logits" in values.arguments(values.classes(module, base)[name])
    if takes and rng.random() < 0.85:
        rest = tuple(pair for pair in make.arguments if pair[0] != "from_logits")
        make = Make(make.name, (*rest, *((("from_logits", "True"),) if is_logits else ())))
    return make
