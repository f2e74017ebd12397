"""A call on slices of its batch: slice, run a replica on each device, merge."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.engines import count_rows, split_tensors
from keras_multigpu.layers import BatchMerge, BatchSlice
from keras_multigpu.layers.batch import batch_rows, slice_bounds, take_slice
from keras_multigpu.modes.losses import add_losses


class SlicedCalls:
    """Calls of a model or a layer on all devices, each replica on a slice of the batch.

    Args:
        layer: the model or layer; gets the losses that the replicas add.
        runner: runs it.
        devices: the names of the devices.
        whole: the model that it is a part of, for warnings.
        warned: the texts that were given as warnings before.
    """

    def __init__(
        self,
        layer: keras.Layer,
        runner: engines.DataRunner,
        devices: Sequence[str],
        whole: keras.Model | None = None,
        warned: set[str] | None = None,
    ):
        self.runner = runner
        self._layer = layer
        self._devices = tuple(devices)
        self._whole = whole
        self._warned = set() if warned is None else warned

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> Any:
        """The outputs of one call; losses and states are added and assigned."""
        runner, call = self.runner, (args, kwargs)
        plan = runner.plan(call, compiled=compiled)
        if plan.is_whole:
            (result,) = runner.run([call], [None], plan)
            self._warn_of(plan)  # after the call: its error comes first
            add_losses(self._layer, result.losses)
            return result.outputs
        slices = _slice(call, len(self._devices), is_part=self._whole is not None)
        results = runner.run(slices.calls, slices.sizes, plan)
        self._warn_of(plan)
        _assign_updates(results, slices.shares, plan)
        add_losses(self._layer, _merge_losses(results, slices, plan))
        return plan.finish(_merge_outputs(results, slices))

    def _warn_of(self, plan: engines.Plan) -> None:
        """Warns once if the call can't use its devices, or if its results may differ."""
        if len(self._devices) == 1:
            return
        title = repr(self._layer.name)
        if self._whole is not None:
            title += f", which a step of {self._whole.name!r} calls,"
        if plan.obstacle:
            text = (
                f"{title} runs on {self._devices[0]!r} alone, and not on "
                f"{len(self._devices)} devices: {plan.obstacle}. The numbers are those of one "
                "device."
            )
        elif plan.doubt:
            text = (
                f"{title} could not be tried on made-up rows ({plan.doubt}). We assume that "
                "its rows are independent, and that the losses and states that its layers add or "
                "assign are means over the rows. Otherwise the numbers differ from one device's."
            )
        else:
            return
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


def _assign_updates(
    results: Sequence[engines.Result], shares: Sequence[Any], plan: engines.Plan
) -> None:
    """Assigns the states that the replicas computed, merged by the plan's rules."""
    for column in zip(*(result.updates for result in results)):
        variable = column[0][0]
        is_float = keras.backend.is_float_dtype(variable.dtype)
        rule = plan.updates.get(id(variable), engines.MEAN if is_float else engines.SAME)
        before = engines.value_of(variable)
        variable.assign(engines.combine(rule, [value for _, value in column], shares, before))


def _merge_losses(
    results: Sequence[engines.Result], slices: _Slices, plan: engines.Plan
) -> Iterator[Any]:
    """The losses of the whole batch, merged from the slices' losses by the plan's rules."""
    for rule, losses in zip(plan.losses, zip(*(result.losses for result in results))):
        if rule == engines.ROWS:
            yield BatchMerge(name="merge_loss")(losses, whole=slices.whole)
        else:
            yield engines.combine(rule, losses, slices.shares)


@dataclasses.dataclass(frozen=True)
class _Slices:
    """A call cut along the rows of its batch.

    Attributes:
        calls: the arguments of each replica.
        sizes: the rows that belong to each; 0 if a replica only has a copy of the last row.
        shares: each size as a part of the batch.
        whole: the tensors of the whole call.
    """

    calls: list[Any]
    sizes: list[Any]
    shares: list[Any]
    whole: list[Any]


def _slice(call: Any, count: int, *, is_part: bool) -> _Slices:
    """Cuts a call into `count` slices, on the host, so that each device receives only its slice.

    A step may call a part with tensors whose numbers of rows are known at run time only, and
    differ. The first slice then has all their rows, and the others have copies.
    """
    tensors, restore = split_tensors(call, keras.ops.is_tensor)
    with engines.current().on_host():
        counts = [count_rows(one) for one in tensors if len(one.shape)]
        if is_part and len(counts) > 1 and not all(isinstance(one, int) for one in counts):
            parts, rows = _slices_if_alike(tensors, count)
            tensors = [keras.ops.zeros([rows])]
        else:
            parts, rows = BatchSlice(count, name="slice")(tensors), batch_rows(tensors)
    sizes = [slice_bounds(rows, index, count)[1] for index in range(count)]
    total = keras.ops.cast(keras.ops.maximum(rows, 1), "float64")
    shares = [keras.ops.cast(size, "float64") / total for size in sizes]
    # For a batch without rows, the first replica's results equal those of one device.
    shares[0] = keras.ops.where(keras.ops.equal(rows, 0), keras.ops.ones_like(total), shares[0])
    return _Slices([restore(part) for part in parts], sizes, shares, tensors)


def _slices_if_alike(tensors: Sequence[Any], count: int) -> tuple[list[list[Any]], Any]:
    """The slices of tensors that may have different numbers of rows, and how many are in use."""
    numbers = [count_rows(one) for one in tensors if len(one.shape)]
    are_alike = keras.ops.all(keras.ops.equal(keras.ops.stack(numbers), numbers[0]))

    def take(tensor: Any, index: int) -> Any:
        if not len(tensor.shape):
            return tensor
        rows = count_rows(tensor)
        apart = (rows, 0) if index else (0, rows)
        bounds = zip(slice_bounds(rows, index, count), apart)
        start, size = (keras.ops.where(are_alike, one, other) for one, other in bounds)
        return take_slice(tensor, rows, start, size)

    slices = [[take(tensor, index) for tensor in tensors] for index in range(count)]
    return slices, keras.ops.where(are_alike, numbers[0], 1)


def _merge_outputs(results: Sequence[engines.Result], slices: _Slices) -> Any:
    taken = [engines.take_apart(result.outputs) for result in results]
    restore = taken[0][1]
    return restore(BatchMerge(name="merge")([parts for parts, _ in taken], whole=slices.whole))
