"""A dense layer on multi-hot rows that are stored as indices only."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_flag, integer_or_none, positive_integer
from keras_multigpu.layers.outputs import fit


@keras.saving.register_keras_serializable(package="keras_multigpu")
class MultiHotDense(keras.Layer):
    """`Dense` on a multi-hot row that is given by the indices of its ones.

    Computes `activation(sum_j weights_j * kernel[index_j] + bias)`. Output, weights and gradients
    equal `keras.layers.Dense` on the multi-hot row, which has a one (or the weight) at each index,
    and their sum where an index repeats. The row, which may have 100,000 columns, is never made.

    Args:
        units: the number of outputs.
        width: the columns of the multi-hot row; indices are from 0 to `width - 1`.
        activation: a Keras activation or its name.
        use_bias: add a bias.
        kernel_initializer: as for `keras.layers.Dense`.
        bias_initializer: as for `keras.layers.Dense`.
        kernel_regularizer: as for `keras.layers.Dense`; it acts on the whole kernel.
        bias_regularizer: as for `keras.layers.Dense`.
        kernel_constraint: as for `keras.layers.Dense`.
        bias_constraint: as for `keras.layers.Dense`.
        padding: an index to ignore, which fills rows with fewer ones: -1, say.
        sparse_gradient: on TensorFlow, give the optimizer only the kernel rows that the batch
            touched: `SGD` without momentum then updates only those. XLA can't compile the model.
            Sparse gradients are exact if the layer is called once per step: after a second call,
            Keras's optimizers square the two parts separately. JAX has no sparse gradients, so
            there the option changes nothing.
        **kwargs: those of `keras.Layer`.

    Input: integers of shape `(rows, ones)`; optionally `weights` of the same shape, as the second
        argument; and a Keras mask of the same shape, which leaves indices out.
    Output: a tensor of shape `(rows, units)`, without a mask.

    TensorFlow raises an error for an index outside of 0 to `width - 1`; compiled by XLA, it uses
    the nearest index, unless the rows of the kernel are spread (`shard`). On JAX, the output
    is not-a-number or uses a row counted from the end.
    Reverse-mode derivatives of any order work, but only the first with `sparse_gradient=True`.
    Forward mode (`jax.jvp`) does not work on JAX on CPUs.

    Raises:
        ValueError: if an argument is of another kind, or the input is no matrix of integers.

    Example:
        >>> import numpy as np
        >>> layer = MultiHotDense(2, width=5)
        >>> output = layer(np.array([[0, 3], [1, 4]]))
        >>> kernel, bias = layer.get_weights()
        >>> row = np.array([[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]])
        >>> bool(np.allclose(output, row @ kernel + bias))
        True
    """

    def __init__(
        self,
        units: int,
        width: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        padding: int | None = None,
        sparse_gradient: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**{"autocast": False, **kwargs})
        self.units = positive_integer("units", units)
        self.width = positive_integer("width", width)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.padding = integer_or_none("padding", padding, "the index that stands for nothing")
        check_flag("sparse_gradient", sparse_gradient)
        self.sparse_gradient = sparse_gradient
        self.supports_masking = True
        if sparse_gradient and keras.backend.backend() == "tensorflow":
            self.supports_jit = False

    def build(self, indices_shape: Any = None, weights_shape: Any = None) -> None:
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.width, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        # Tells the engine how to sum several devices' gradients: each row once, or dense.
        self.kernel.names_rows_once = self.sparse_gradient
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def call(self, indices: Any, weights: Any = None, mask: Any = None) -> Any:
        ops, dtype = keras.ops, self.compute_dtype
        indices = ops.convert_to_tensor(indices)
        self._check(indices, weights)
        weights = None if weights is None else ops.cast(weights, dtype)
        is_real = mask
        if self.padding is not None:
            is_index = ops.not_equal(indices, self.padding)
            is_real = is_index if mask is None else ops.logical_and(mask, is_index)
        if is_real is not None:
            indices = ops.where(is_real, indices, ops.zeros_like(indices))
            kept = ops.cast(is_real, dtype)
            weights = kept if weights is None else ops.where(is_real, weights, kept)
        sum_rows = engines.current().sum_rows
        outputs = sum_rows(self.kernel, indices, weights, dtype, self.sparse_gradient)
        if self.use_bias:
            outputs = outputs + ops.cast(self.bias, dtype)
        return self.activation(outputs)

    def _check(self, indices: Any, weights: Any) -> None:
        kind = keras.backend.standardize_dtype(indices.dtype)
        if len(indices.shape) != 2 or not keras.backend.is_int_dtype(kind):
            raise ValueError(
                "Indices must be integers of shape (rows, ones). Received: indices of shape "
                f"{tuple(indices.shape)} and dtype {kind}. Give what "
                "`HashEncoder.transform(table)` returns, to an input that is declared as "
                '`keras.Input((encoder.ones,), dtype="int32")`.'
            )
        if weights is not None and not fit(weights.shape, indices.shape):
            raise ValueError(
                "Weights must be of the shape of the indices, one for each. Received: weights of "
                f"shape {tuple(weights.shape)}, and indices of shape {tuple(indices.shape)}."
            )

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """Returns no mask: a mask belongs to the indices, not to the output."""

    def compute_output_shape(self, indices_shape: Any, weights_shape: Any = None) -> Any:
        return (indices_shape[0], self.units)

    def get_config(self) -> dict[str, Any]:
        own = {
            "units": self.units,
            "width": self.width,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "padding": self.padding,
            "sparse_gradient": self.sparse_gradient,
        }
        return {**super().get_config(), **own}
