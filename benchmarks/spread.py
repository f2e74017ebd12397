"""How the work of a step is spread over the devices on JAX, layer by layer.

For every layer of `keras.layers` and every model of `keras.applications`, prints the operations of
one of four devices (as XLA counts them in the compiled step), divided by the operations of a single
device: 0.25 is perfect, 1.00 means that each device computes the whole batch. Run it with

    KERAS_BACKEND=jax python -m benchmarks.spread [--part layers|applications] [name ...]

Compiling the training steps of all applications takes hours; `--only prediction` leaves them out.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib
import keras
import numpy as np

from keras_multigpu import make_parallel, use_virtual_devices

_DEVICES = 4
_ROWS = 16
_SIZE = 32  # pixels of the applications' images, where they take so few
# Compiling takes most of the time; these options don't change what the code does.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

_IMAGE, _ROW, _TIME, _CUBE = (16, 16, 8), (64,), (32, 16), (8, 8, 8, 4)
# Required arguments of layers, and the shape of their inputs if it matters.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "Activation": {"activation": "gelu"},
    "Cropping1D": {"cropping": 2},
    "CenterCrop": {"height": 8, "width": 8},
    "Dense": {"units": 64},
    "EinsumDense": {"equation": "abc,cd->abd", "output_shape": (None, 32)},
    "Embedding": {"input_dim": 100, "output_dim": 16},
    "ReversibleEmbedding": {"input_dim": 100, "output_dim": 16},
    "GroupNormalization": {"groups": 4},
    "GroupedQueryAttention": {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 2},
    "MultiHeadAttention": {"num_heads": 4, "key_dim": 8},
    "Normalization": {"mean": 0.5, "variance": 2.0},
    "Permute": {"dims": (2, 1)},
    "RepeatVector": {"n": 4},
    "Reshape": {"target_shape": (-1,)},
    "Rescaling": {"scale": 0.5},
    "Resizing": {"height": 8, "width": 8},
    "RandomCrop": {"height": 8, "width": 8},
    "Discretization": {"bin_boundaries": [-1.0, 0.0, 1.0]},
    "CategoryEncoding": {"num_tokens": 100, "output_mode": "multi_hot"},
    "Dot": {"axes": -1},
    "MelSpectrogram": {"fft_length": 32, "sequence_length": 32, "sequence_stride": 8},
    "STFTSpectrogram": {"frame_length": 32, "frame_step": 8},
}
_USUAL = {"filters": 16, "kernel_size": 3, "units": 32, "output_size": 4, "rate": 0.5}
_USUAL |= {"factor": 0.2, "stddev": 0.2, "value_range": (0, 1)}
_USUAL |= {"pool_size": 2, "height_factor": 0.2, "width_factor": 0.2}
_SHAPES = {
    "EinsumDense": _TIME,
    "Permute": _TIME,
    "MelSpectrogram": (256,),
    "STFTSpectrogram": (256, 1),
    "Softmax": _TIME,
    "Attention": _TIME,
    "AdditiveAttention": _TIME,
    "GroupedQueryAttention": _TIME,
    "MultiHeadAttention": _TIME,
    "Embedding": _ROW,
    "ReversibleEmbedding": _ROW,
    "RepeatVector": _ROW,
    "CategoryEncoding": _ROW,
    "Dot": _ROW,
    "ConvLSTM1D": (4, 16, 8),
    "ConvLSTM2D": (4, 8, 8, 4),
    "ConvLSTM3D": (4, 4, 4, 4, 2),
    "Dense": _ROW,
}
_OF_TIME = {"GRU", "LSTM", "SimpleRNN", "Masking"}
_OF_INDICES = {"Embedding", "ReversibleEmbedding", "CategoryEncoding"}
_OF_TWO = {"GroupedQueryAttention", "MultiHeadAttention"}
_OF_SEVERAL = {"Add", "AdditiveAttention", "Attention", "Average", "Concatenate", "Dot"}
_OF_SEVERAL |= {"Maximum", "Minimum", "Multiply", "Subtract"}


def layer_makers() -> dict[str, Callable[[], keras.Layer] | None]:
    """A maker for each layer of `keras.layers`; `None` if arguments alone don't suffice."""
    makers: dict[str, Callable[[], keras.Layer] | None] = {}
    seen: set[Any] = set()
    for _, cls in inspect.getmembers(keras.layers, inspect.isclass):
        if issubclass(cls, keras.Layer) and cls not in seen:
            seen.add(cls)
            makers[cls.__name__] = _maker(cls.__name__, cls)
    makers.update(_wrapped())
    for name in ("Conv1D", "Conv2D", "Conv3D"):
        cls = getattr(keras.layers, name)
        makers[f"{name}, 4 groups"] = lambda cls=cls: cls(16, 3, groups=4)
    return dict(sorted(makers.items()))


def _maker(name: str, cls: Any) -> Callable[[], keras.Layer] | None:
    parameters = inspect.signature(cls.__init__).parameters
    arguments = dict(_ARGUMENTS.get(name, {}))
    for key, value in _USUAL.items():
        if key in parameters and parameters[key].default is inspect.Parameter.empty:
            arguments.setdefault(key, value)
    missing = [
        key
        for key, one in parameters.items()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        if key not in ("self", *arguments)
    ]
    return None if missing else lambda: cls(**arguments)


def _wrapped() -> dict[str, Callable[[], keras.Layer]]:
    layers = keras.layers
    return {
        "Bidirectional": lambda: layers.Bidirectional(layers.GRU(16)),
        "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(16)),
        "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Conv2D(8, 3)),
        "RNN": lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(16)])),
        "Lambda": lambda: layers.Lambda(keras.ops.tanh),
    }


def _input_shape(name: str) -> tuple[int, ...]:
    base = name.partition(",")[0]
    if base in _SHAPES:
        return _SHAPES[base]
    if base in _OF_TIME or base in ("Bidirectional", "TimeDistributed", "RNN") or "1D" in base:
        return _TIME
    if "3D" in base:
        return _CUBE
    return (16, 16, 3) if _is_image(base) else _IMAGE


def _is_image(name: str) -> bool:
    cls = getattr(keras.layers, name, None)
    module = getattr(cls, "__module__", "")
    return "image_preprocessing" in module


def layer_model(name: str, make: Callable[[], keras.Layer]) -> tuple[keras.Model, Any]:
    """A model of one layer followed by a dense one, and a batch of inputs."""
    keras.utils.set_random_seed(1)
    layer, shape = make(), _input_shape(name)
    is_indices = name in _OF_INDICES
    batch = np.random.default_rng(1).uniform(0, 1, (_ROWS, *shape)).astype("float32")
    if is_indices:
        batch = (batch * 100).astype("int32")
    inputs = keras.Input(shape, dtype=str(batch.dtype))
    if name in _OF_TWO:
        outputs = layer(inputs, inputs)
    else:
        outputs = layer([inputs, inputs] if name in _OF_SEVERAL else inputs)
    outputs = keras.tree.flatten(outputs)[0]
    if len(outputs.shape) > 2:
        outputs = keras.layers.GlobalAveragePooling1D()(
            keras.layers.Reshape((-1, outputs.shape[-1] or 1))(outputs)
        )
    return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.cast(outputs, "float32"))), batch


def application_model(make: Any) -> tuple[keras.Model, Any]:
    """A model of `keras.applications`, and a batch of its smallest images."""
    for size in (_SIZE, 75, 224, 331):
        try:
            model = make(
                weights=None, include_top=False, input_shape=(size, size, 3), pooling="avg"
            )
        except ValueError as error:
            reason = error
            continue
        return model, np.ones((8, size, size, 3), "float32")
    raise reason


def measure(model: keras.Model, x: Any, training: bool) -> float:
    """A device's operations in a compiled step on several, divided by those on one."""
    alone = _operations(model, x, training)
    return _operations(make_parallel(model, _DEVICES), x, training) / max(alone, 1)


def _operations(model: Any, x: Any, training: bool) -> float:
    lists = [model.trainable_variables, model.non_trainable_variables]
    batch: Any = (x,)
    if training:
        spec = model.outputs[0].shape
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        batch = (x, np.zeros((len(x), *spec[1:]), "float32"))
        model.compute_loss(batch[0], batch[1], batch[1])  # builds the loss and its metrics
        lists += [model.optimizer.variables, model.metrics_variables]
    state: Any = tuple([variable.value for variable in one] for one in lists)
    if hasattr(model, "_parallel_steps"):
        place = model._parallel_steps.where
        state, batch = place.put_state(state), place.put_batch(batch)
    step = model.train_step if training else model.predict_step
    compiled = jax.jit(step).lower(state, batch).compile(compiler_options=_QUICK)
    return float(compiled.cost_analysis()["flops"])


def rows(part: str, names: list[str], only: str | None) -> Iterator[str]:
    """The lines of a table, one by one as they are measured."""
    if part == "layers":
        makers: dict[str, Any] = dict(layer_makers())
    else:
        makers = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    for name in names or makers:
        make = makers[name]
        if make is None:
            yield f"| {name} | | | not measured: needs data, a model or a function |"
            continue
        yield _row(part, name, make, only)


def _row(part: str, name: str, make: Any, only: str | None) -> str:
    shares, note = [], ""
    for training in (True, False):
        if only == ("prediction" if training else "training"):
            shares.append("")
            continue
        try:
            model, x = layer_model(name, make) if part == "layers" else application_model(make)
            shares.append(f"{measure(model, x, training):.2f}")
        except Exception as error:  # the layer doesn't take this input; the table says so
            shares.append("")
            note = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return f"| {name} | {shares[0]} | {shares[1]} | {note} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("layers", "applications"))
    parser.add_argument("--only", choices=("training", "prediction"))
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    use_virtual_devices(_DEVICES)
    print(
        f"{datetime.date.today()}, Keras {keras.__version__}, JAX {jax.__version__}, jaxlib "
        f"{jaxlib.__version__}; {_DEVICES} virtual CPU devices, batches of {_ROWS} rows "
        "(8 images for the applications)."
    )
    for part in [options.part] if options.part else ["layers", "applications"]:
        print(f"\n| {part} | training | prediction | |\n| --- | ---: | ---: | --- |", flush=True)
        for row in rows(part, options.names, options.only):
            print(row, flush=True)


if __name__ == "__main__":
    main()
