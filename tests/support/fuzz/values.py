"""Values for the arguments of layers, losses, metrics and optimizers, by the arguments' names.

The arguments themselves are found by introspection. Values are Python text.
"""

from __future__ import annotations

import functools
import inspect
import random
from typing import Any

import keras

from . import case

ACTIVATIONS = [
    repr(name)
    for name in sorted(dir(keras.activations))
    if name not in ("deserialize", "get", "serialize", "glu") and not name.startswith("_")
]
INITIALIZERS = ["'normal'", "'ones'", "'zeros'", "keras.initializers.RandomNormal(stddev=2.0)"]
INITIALIZERS += ["'glorot_uniform'", "'he_normal'", "'lecun_uniform'"]
REGULARIZERS = ["'l1'", "'l2'", "keras.regularizers.L1L2(0.1, 0.1)"]
CONSTRAINTS = ["'max_norm'", "'non_neg'", "'unit_norm'", "'min_max_norm'"]
FLAGS = ["True", "False"]

BY_NAME: dict[str, list[str]] = {
    "activation": ACTIVATIONS,
    "alpha": ["0.5", "0.2"],
    "antialias": FLAGS,
    "attention_axes": ["None"],
    "axes": ["-1", "1"],
    "axis": ["-1"],
    "equation": ["'ab,bc->ac'"],
    "output_shape": ["3"],
    "backward_layer": ["None"],
    "beta": ["0.7", "2.0"],
    "bin_boundaries": ["[-0.5, 0.0, 0.7]"],
    "bins": ["16"],
    "cell": ["layers.GRUCell(3)", "layers.LSTMCell(3)", "layers.SimpleRNNCell(3)"],
    "cells": ["[layers.GRUCell(3), layers.SimpleRNNCell(2)]", "[layers.LSTMCell(3)]"],
    "center": FLAGS,
    "clip_limit": ["2.0"],
    "crop_to_aspect_ratio": FLAGS,
    "depth_multiplier": ["1", "2"],
    "dilation_rate": ["1", "2"],
    "dims": ["(2, 1)"],
    "dropout": ["0.0"],
    "epsilon": ["1e-3", "1e-5"],
    "expand_dims": FLAGS,
    "fill_value": ["0.0", "1.0"],
    "filters": ["2", "4"],
    "frame_length": ["16"],
    "frame_step": ["8"],
    "fft_length": ["16"],
    "go_backwards": FLAGS,
    "groups": ["1", "2"],
    "head_dim": ["3"],
    "height": ["4", "6"],
    "height_factor": ["0.2"],
    "idf_weights": ["None"],
    "input_dim": ["12", "60"],
    "interpolation": ["'bilinear'", "'nearest'"],
    "invert": ["False"],
    "keepdims": FLAGS,
    "kernel_size": ["1", "2", "3"],
    "key_dim": ["2", "3"],
    "l1": ["0.1"],
    "l2": ["0.1"],
    "logit_soft_cap": ["3.0"],
    "layer": ["layers.Dense(3)"],
    "layers": ["[layers.Rescaling(0.5), layers.Dense(3)]"],
    "mask_value": ["0.0"],
    "mask_zero": FLAGS,
    "max_norm": ["1.0"],
    "max_tokens": ["12"],
    "max_value": ["1.0", "None"],
    "mean": ["0.5"],
    "merge_mode": ["'concat'", "'sum'", "'mul'", "'ave'"],
    "momentum": ["0.9", "0.5"],
    "n": ["3"],
    "negative_slope": ["0.1", "0.0"],
    "noise_shape": ["None"],
    "normalize": FLAGS,
    "num_bins": ["6", "11"],
    "num_heads": ["1", "2"],
    "num_key_value_heads": ["1", "2"],
    "num_mel_bins": ["4"],
    "num_oov_indices": ["1", "2"],
    "num_query_heads": ["2"],
    "num_tokens": ["12"],
    "offset": ["0.5"],
    "output_dim": ["3", "4"],
    "output_padding": ["None"],
    "output_sequence_length": ["6", "None"],
    "output_size": ["2", "1"],
    "pad_to_max_tokens": FLAGS,
    "padding": ["'valid'", "'same'"],
    "pool_size": ["1", "2"],
    "power_iterations": ["1", "2"],
    "rate": ["0.0"],
    "recurrent_activation": ["'sigmoid'", "'hard_sigmoid'"],
    "recurrent_dropout": ["0.0"],
    "reset_after": FLAGS,
    "return_sequences": FLAGS,
    "salt": ["7"],
    "scale": FLAGS,
    "score_mode": ["'dot'", "'concat'"],
    "sequence_length": ["16"],
    "sequence_stride": ["8"],
    "shared_axes": ["[1]"],
    "size": ["2"],
    "sliding_window": ["2"],
    "sparse": FLAGS,
    "standardize": ["'lower'", "None"],
    "stddev": ["0.0"],
    "strides": ["1", "2"],
    "target_shape": ["(-1,)", "(1, -1)", "(-1, 1)"],
    "threshold": ["0.0", "0.5"],
    "tie_weights": FLAGS,
    "tile_grid_size": ["(2, 2)"],
    "unit_forget_bias": FLAGS,
    "units": ["1", "3", "6"],
    "unroll": FLAGS,
    "use_bias": FLAGS,
    "use_gate": FLAGS,
    "use_scale": FLAGS,
    "value_dim": ["3"],
    "value_range": ["(0, 255)", "(0, 1)"],
    "variance": ["2.0"],
    "width": ["4", "6"],
    "width_factor": ["0.2"],
    "zero_output_for_mask": FLAGS,
}
# Names with a different meaning in one class.
IN_CLASS: dict[str, list[str]] = {
    "BatchNormalization.axis": ["-1", "1"],
    "BatchNormalization.renorm": FLAGS,
    "Concatenate.axis": ["-1", "1"],
    "Conv1D.padding": ["'valid'", "'same'", "'causal'"],
    "Cropping1D.cropping": ["(1, 1)", "1"],
    "Cropping2D.cropping": ["((1, 0), (0, 1))", "1"],
    "Cropping3D.cropping": ["((1, 0), (0, 1), (1, 0))", "1"],
    "Discretization.output_mode": ["'int'", "'one_hot'", "'multi_hot'", "'count'"],
    "EinsumDense.bias_axes": ["None"],
    "GRU.activation": ["'tanh'", "'relu'"],
    "GroupNormalization.groups": ["1", "2", "-1"],
    "IntegerLookup.mask_token": ["0", "None"],
    "IntegerLookup.vocabulary": ["[1, 2, 3, 5, 8]"],
    "IntegerLookup.pad_to_max_tokens": ["False"],
    "IntegerLookup.idf_weights": ["None"],
    "IntegerLookup.salt": ["None"],
    "MultiHeadAttention.output_shape": ["4"],
    "LSTM.activation": ["'tanh'", "'relu'"],
    "LayerNormalization.axis": ["-1", "1", "[1, -1]"],
    "Lambda.output_shape": ["None"],
    "Lambda.function": ["ops.tanh", "lambda x: x * x", "ops.exp"],
    "Normalization.axis": ["-1"],
    "Permute.dims": ["(2, 1)", "(2, 1, 3)", "(3, 1, 2, 4)"],
    "RMSNormalization.axis": ["-1"],
    "RNN.return_state": ["False"],
    "Rescaling.scale": ["0.5", "2.0"],
    "Softmax.axis": ["-1", "1", "0"],
    "StringLookup.mask_token": ["''", "None"],
    "StringLookup.vocabulary": ["['red', 'green', 'blue']"],
    "StringLookup.salt": ["None"],
    "StringLookup.pad_to_max_tokens": ["False"],
    "STFTSpectrogram.mode": ["'log'", "'magnitude'", "'real'", "'psd'"],
    "TextVectorization.output_mode": ["'int'", "'multi_hot'", "'count'"],
    "TextVectorization.vocabulary": ["['red', 'green', 'blue']"],
    "TextVectorization.pad_to_max_tokens": ["False"],
    "TextVectorization.ngrams": ["2"],
    "UnitNormalization.axis": ["-1", "1"],
    "ZeroPadding1D.padding": ["1", "(1, 2)"],
    "ZeroPadding2D.padding": ["1", "((1, 0), (0, 2))"],
    "ZeroPadding3D.padding": ["1"],
}
_ENDS = {
    "_initializer": INITIALIZERS,
    "_regularizer": REGULARIZERS,
    "_constraint": CONSTRAINTS,
    "factor": ["0.3", "2"],
}
# They name things, or choose what is drawn elsewhere.
_LEFT_OUT = {"self", "args", "kwargs", "name", "dtype", "seed", "data_format", "return_state"}
_LEFT_OUT |= {"stateful", "weights", "lora_rank", "lora_alpha", "quantization_config", "encoding"}
_LEFT_OUT |= {"flash_attention", "use_cudnn", "ragged", "oov_token", "vocabulary_dtype"}


def values_of(name: str, argument: str) -> list[str] | None:
    """The texts to choose from; `None` if the table has none."""
    if f"{name}.{argument}" in IN_CLASS:
        return IN_CLASS[f"{name}.{argument}"]
    if argument in BY_NAME:
        return BY_NAME[argument]
    return next((values for end, values in _ENDS.items() if argument.endswith(end)), None)


def draw(rng: random.Random, made: type, prefix: str, share: float = 0.25) -> case.Make:
    """A call of a class, with its required arguments and some of the others.

    Raises:
        LookupError: if the table has no value for a required argument.
    """
    arguments = []
    for parameter in inspect.signature(made.__init__).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name in _LEFT_OUT or is_variadic:
            continue
        is_required = parameter.default is parameter.empty
        values = values_of(made.__name__, parameter.name)
        if is_required and values is None:
            raise LookupError(f"no value for its argument {parameter.name!r}")
        always = is_required or f"{made.__name__}.{parameter.name}" in _ALWAYS
        if values and (always or rng.random() < share):
            arguments.append((parameter.name, rng.choice(values)))
    return case.Make(f"{prefix}.{made.__name__}", tuple(arguments))


# Their defaults are too large for small inputs, or can't be called at all.
_ALWAYS = {
    "CategoryEncoding.num_tokens",
    "Discretization.bin_boundaries",
    "GroupNormalization.groups",
    "IntegerLookup.vocabulary",
    "MelSpectrogram.fft_length",
    "MelSpectrogram.num_mel_bins",
    "MelSpectrogram.sequence_stride",
    "Normalization.mean",
    "Normalization.variance",
    "STFTSpectrogram.fft_length",
    "STFTSpectrogram.frame_length",
    "STFTSpectrogram.frame_step",
    "StringLookup.vocabulary",
    "TextVectorization.vocabulary",
    "ContrastLimitedAdaptiveHistogramEqualization.tile_grid_size",
}


@functools.cache
def classes(module: Any, base: type | None = None) -> dict[str, type]:
    """The classes that a module of Keras exports, each by its own name."""
    found = {name: getattr(module, name) for name in sorted(dir(module))}
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value)
        and value.__name__ == name
        and (base is None or (issubclass(value, base) and value is not base))
    }


def arguments(made: type) -> list[str]:
    """The names of a class's arguments."""
    return list(inspect.signature(made.__init__).parameters)
