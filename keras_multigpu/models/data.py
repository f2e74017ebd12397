"""Data mode: slice the batch, a replica per device, merge the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.layers import BatchMerge, BatchSlice
from keras_multigpu.layers.batch import batch_rows, slice_bounds
from keras_multigpu.models.base import ParallelModel


class DataParallel(ParallelModel):
    """The maths of one device on n devices: a slice of the batch for each.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        wire_dtype: the type in which trainable weights and their gradients cross between
            devices: `None` (their own), `"bfloat16"` or `"float16"`.
    """

    mode = "data"

    def __init__(
        self, template: keras.Model, devices: Sequence[str], *, wire_dtype: str | None = None
    ):
        super().__init__(template, devices)
        self.wire_dtype = wire_dtype
        self._replicas = engines.current().make_replicas(template, self.devices, wire_dtype)

    @classmethod
    def check(
        cls, template: keras.Model, devices: Sequence[str], wire_dtype: str | None = None
    ) -> None:
        """Refuses what data mode can't do.

        Raises:
            ValueError: if the batch size is built into the template, or the wire's type is not
                one of those that are known.
        """
        if wire_dtype not in (None, "bfloat16", "float16"):
            raise ValueError(
                '`wire_dtype` must be None, "bfloat16" or "float16". '
                f"Received: wire_dtype={wire_dtype!r}."
            )
        for tensor in keras.tree.flatten(getattr(template, "inputs", None)):
            if len(devices) > 1 and tensor is not None and tensor.shape[0] is not None:
                name = tensor.name
                raise ValueError(
                    "Data mode slices the batch, so the template must take any batch size. "
                    f"Received: a model whose input {name!r} has the fixed batch_shape="
                    f"{tuple(tensor.shape)}. Rebuild it with `keras.Input(shape="
                    f"{tuple(tensor.shape[1:])}, name={name!r})`, without a batch size, and "
                    "copy the weights with `set_weights`."
                )

    def _call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, restore = _take_tensors((args, kwargs))
        with engines.current().on_host():
            slices = BatchSlice(len(self.devices), name="slice")(tensors)
        results = self._replicas.run([restore(part) for part in slices], compiled=self.jit_compile)
        shares = self._shares(tensors)
        self._assign_updates([result.updates for result in results], shares)
        for losses in zip(*(result.losses for result in results)):
            # Not `self.add_loss`: a functional model has it for symbolic losses only.
            keras.Layer.add_loss(self, _merge_loss(losses, shares, tensors))
        return BatchMerge(name="merge")([result.outputs for result in results], whole=tensors)

    def _shares(self, tensors: list[Any]) -> list[Any]:
        """The part of the batch that each replica has: 0 for one beyond its last row."""
        rows = batch_rows(tensors)
        count = len(self.devices)
        sizes = [slice_bounds(rows, index, count)[1] for index in range(count)]
        total = keras.ops.cast(rows, "float32")
        return [keras.ops.cast(size, "float32") / total for size in sizes]

    def _assign_updates(self, updates: Sequence[Any], shares: Sequence[Any]) -> None:
        """Moving statistics become the mean over the rows; counters and seeds are equal."""
        for column in zip(*updates):
            variable, first = column[0]
            if keras.backend.is_float_dtype(variable.dtype):
                variable.assign(_weighted_sum([value for _, value in column], shares))
            else:
                variable.assign(first)


def _merge_loss(losses: Sequence[tuple[Any, bool]], shares: Sequence[Any], whole: Any) -> Any:
    """The loss of the whole batch, of which each replica has its slice's."""
    values = [value for value, _ in losses]
    if len(values[0].shape):
        return BatchMerge(name="merge_loss")(values, whole=whole)
    is_sum = losses[0][1]
    return _weighted_sum(values, [keras.ops.sign(share) if is_sum else share for share in shares])


def _weighted_sum(values: Sequence[Any], shares: Sequence[Any]) -> Any:
    return sum(value * keras.ops.cast(share, value.dtype) for value, share in zip(values, shares))


def _take_tensors(structure: Any) -> tuple[list[Any], Any]:
    """The tensors of a structure, and the function that puts others in their places."""
    flat = keras.tree.flatten(structure)
    places = [place for place, part in enumerate(flat) if keras.ops.is_tensor(part)]

    def restore(tensors: Sequence[Any]) -> Any:
        restored = list(flat)
        for place, tensor in zip(places, tensors):
            restored[place] = tensor
        return keras.tree.pack_sequence_as(structure, restored)

    return [flat[place] for place in places], restore
