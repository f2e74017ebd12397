"""What the census of training steps looks at: layers, losses, metrics, optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from benchmarks.tensorflow_census_models import (
    COMPOSED,
    FLAT,
    IMAGE,
    MERGED,
    PAIR,
    SEQUENCE,
    VOLUME,
    WORDS,
)

L = keras.layers
# {layer: (arguments, the shape of a sample)}
ARGUMENTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "Activation": (("gelu",), FLAT),
    "AlphaDropout": ((0.5,), FLAT),
    "CategoryEncoding": ((9,), WORDS),
    "Dense": ((4,), FLAT),
    "Discretization": ((), FLAT),
    "Dot": ((2,), PAIR),
    "Dropout": ((0.5,), FLAT),
    "EinsumDense": (("abc,cd->abd", (5, 4)), SEQUENCE),
    "Embedding": ((9, 4), WORDS),
    "Flatten": ((), IMAGE),
    "GaussianDropout": ((0.5,), FLAT),
    "GaussianNoise": ((0.5,), FLAT),
    "GroupNormalization": ((3,), IMAGE),
    "GroupQueryAttention": ((4, 4, 2), PAIR),
    "Hashing": ((5,), WORDS),
    "IntegerLookup": ((), None),
    "LayerNormalization": ((), SEQUENCE),
    "Masking": ((), SEQUENCE),
    "MelSpectrogram": ((), (4000,)),
    "MultiHeadAttention": ((2, 3), PAIR),
    "Permute": (((2, 1),), SEQUENCE),
    "RMSNormalization": ((), SEQUENCE),
    "RandomBrightness": ((0.2,), IMAGE),
    "RandomColorDegeneration": ((0.5,), IMAGE),
    "RandomContrast": ((0.2,), IMAGE),
    "RandomHue": ((0.2,), IMAGE),
    "RandomPosterization": ((4,), IMAGE),
    "RandomRotation": ((0.2,), IMAGE),
    "RandomSaturation": ((0.5,), IMAGE),
    "RandomSharpness": ((0.5,), IMAGE),
    "RandomShear": ((0.1, 0.1), IMAGE),
    "RandomTranslation": ((0.1, 0.1), IMAGE),
    "RandomZoom": ((0.2,), IMAGE),
    "RepeatVector": ((3,), FLAT),
    "Rescaling": ((0.5,), IMAGE),
    "Reshape": (((3, 2),), FLAT),
    "Resizing": ((4, 4), IMAGE),
    "CenterCrop": ((4, 4), IMAGE),
    "RandomCrop": ((4, 4), IMAGE),
    "ReversibleEmbedding": ((9, 4), WORDS),
    "STFTSpectrogram": ((), (400, 1)),
    "UnitNormalization": ((), SEQUENCE),
    "ConvLSTM1D": ((3, 3), (4, 8, 4)),
    "ConvLSTM2D": ((3, 3), (3, 6, 6, 2)),
    "ConvLSTM3D": ((2, 3), (3, 5, 5, 5, 2)),
    "GRU": ((4,), SEQUENCE),
    "LSTM": ((4,), SEQUENCE),
    "SimpleRNN": ((4,), SEQUENCE),
}
BY_DIMENSIONS = {
    "Conv": (4, 3),
    "SeparableConv": (4, 3),
    "DepthwiseConv": (3,),
    "ZeroPadding": (1,),
    "Cropping": (1,),
    "UpSampling": (2,),
    "MaxPooling": (2,),
    "AveragePooling": (2,),
    "GlobalMaxPooling": (),
    "GlobalAveragePooling": (),
    "AdaptiveAveragePooling": (2,),
    "AdaptiveMaxPooling": (2,),
    "SpatialDropout": (0.5,),
}
_SKIPPED = (
    "Layer",
    "InputLayer",
    "Wrapper",
    "RNN",
    "Bidirectional",
    "TimeDistributed",
    "SpectralNormalization",
    "StackedRNNCells",
    "Lambda",
    "TorchModuleWrapper",
    "FlaxLayer",
    "JaxLayer",
    "Pipeline",
    "TFSMLayer",
    "StringLookup",
    "MaxNumBoundingBoxes",
    "Equalization",
    "AugMix",
    "TextVectorization",
    "HashedCrossing",
    "IntegerLookup",
    "Discretization",
    "Conv1DTranspose",
    "Conv2DTranspose",
    "Conv3DTranspose",
    "RandomElasticTransform",
)


def layers() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """(name, a function that makes the layer, the shape of a sample)."""
    for name, kind in sorted(inspect.getmembers(L, inspect.isclass)):
        if (
            not issubclass(kind, L.Layer)
            or name in _SKIPPED
            or (name != kind.__name__ and hasattr(L, kind.__name__))
            or name.endswith(("Cell", "Cells", "Wrapper"))
        ):
            continue
        base, dimensions = name[:-2], name[-2:]
        if name in ARGUMENTS:
            arguments, shape = ARGUMENTS[name]
            yield name, lambda kind=kind, arguments=arguments: kind(*arguments), shape
        elif base in BY_DIMENSIONS:
            shape = {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}[dimensions]
            yield name, lambda kind=kind, arguments=BY_DIMENSIONS[base]: kind(*arguments), shape
        elif name in (
            "Add",
            "Average",
            "Concatenate",
            "Maximum",
            "Minimum",
            "Multiply",
            "Subtract",
        ):
            yield name, kind, MERGED
        elif name in ("Attention", "AdditiveAttention"):
            yield name, kind, PAIR
        else:
            is_image = name.startswith(
                (
                    "Random",
                    "Aug",
                    "Auto",
                    "Rand",
                    "Cut",
                    "Mix",
                    "Contrast",
                    "Solar",
                    "Equal",
                    "Max",
                    "Batch",
                )
            )
            yield name, kind, IMAGE if is_image else SEQUENCE
    for name, (make, shape) in COMPOSED.items():
        yield name, make, shape


def optimizers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, a function that makes the optimizer)."""
    O = keras.optimizers  # noqa: E741, N806
    for name, kind in sorted(inspect.getmembers(O, inspect.isclass)):
        if name in ("Optimizer", "LossScaleOptimizer", "Muon", "MultiOptimizer"):
            continue
        yield name, lambda kind=kind: kind(0.01)
    yield "Muon", lambda: O.Muon(0.01)
    yield "LossScaleOptimizer", lambda: O.LossScaleOptimizer(O.Adam(0.01))
    yield "use_ema", lambda: O.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    yield "clipnorm", lambda: O.SGD(0.01, clipnorm=0.01)
    yield "global_clipnorm", lambda: O.SGD(0.01, global_clipnorm=0.01)
    yield "clipvalue", lambda: O.SGD(0.01, clipvalue=0.001)
    yield "gradient_accumulation_steps", lambda: O.Adam(0.01, gradient_accumulation_steps=2)
    yield "weight_decay", lambda: O.Adam(0.01, weight_decay=0.1)


def _target(kind: str) -> str:
    if "Sparse" in kind or kind in ("Circle", "CategoricalGeneralizedCrossEntropy"):
        return "class"
    if kind == "CTC":
        return "ctc"
    return (
        "one of many" if "Categorical" in kind or kind in ("TopKCategoricalAccuracy",) else "bits"
    )


def losses() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """(name, a function that makes the loss, its kind of target)."""
    for name, kind in sorted(inspect.getmembers(keras.losses, inspect.isclass)):
        if name != "Loss":
            yield name, kind, _target(name)


METRICS: dict[str, tuple[Any, ...]] = {
    "IoU": (2, [0]),
    "BinaryIoU": (),
    "MeanIoU": (2,),
    "OneHotIoU": (3, [0, 1]),
    "OneHotMeanIoU": (3,),
    "PrecisionAtRecall": (0.5,),
    "RecallAtPrecision": (0.5,),
    "SensitivityAtSpecificity": (0.5,),
    "SpecificityAtSensitivity": (0.5,),
    "SparseTopKCategoricalAccuracy": (2,),
    "TopKCategoricalAccuracy": (2,),
}


def metrics() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """(name, a function that makes the metric, its kind of target)."""
    for name, kind in sorted(inspect.getmembers(keras.metrics, inspect.isclass)):
        if name in (
            "Metric",
            "MeanMetricWrapper",
            "Mean",
            "Sum",
            "MeanTensor",
            "ConcordanceCorrelation",
        ):
            continue
        target = "one of many" if name.startswith("OneHot") else _target(name)
        yield name, lambda kind=kind, name=name: kind(*METRICS.get(name, ())), target
    yield (
        "Precision of classes",
        lambda: keras.metrics.Precision(class_id=1, top_k=2),
        "one of many",
    )
    yield "AUC, many labels", lambda: keras.metrics.AUC(multi_label=True, num_labels=3), "bits"
    yield "MeanIoU of labels", lambda: keras.metrics.MeanIoU(2), "bits"
