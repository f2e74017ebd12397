"""Data mode: each device computes a slice of the batch, with the numbers of one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_choice, number_of, positive_integer
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.modes.base import ParallelModel
from keras_multigpu.modes.parts import Parts


@keras.saving.register_keras_serializable(package="keras_multigpu")
class DataParallel(ParallelModel):
    """Computes on n devices what one device would: each takes a slice of the batch.

    `make_parallel` has the options. `wire_dtype` must be `None` on JAX, whose compiler chooses what
    crosses; files saved with another value load there with a warning.
    """

    mode = "data"
    _parallel_names = ("placement",)
    _parallel_methods = ("explain", "function")
    _parallel_runner: engines.DataRunner

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        shard: str | None = None,
        model_devices: int = 1,
    ):
        options: dict[str, Any] = {"wire_dtype": wire_dtype, "shard": shard}
        options["model_devices"] = int(model_devices)
        super().__init__(template, devices, options)
        runner = engines.current().data_runner.make(template, devices, options)
        self._parallel_run_on(runner)
        self._parallel_parts = Parts(self, runner)

    @classmethod
    def _parallel_check(cls, options: Mapping[str, Any]) -> None:
        check_choice("wire_dtype", options.get("wire_dtype"), None, "bfloat16", "float16")
        check_choice("shard", options.get("shard"), None, "optimizer", "weights")
        positive_integer("model_devices", options.get("model_devices", 1))

    def _parallel_lay_out(self) -> None:
        super()._parallel_lay_out()
        shard = self._parallel_options["shard"]
        if not shard or len(self.devices) == 1:
            return
        kept, weights = self.placement, self.template.variables
        sizes = {one.path: math.prod(one.shape) for one in weights if one.path in kept}
        largest = max(sizes.values(), default=0)
        if 0 < largest < 1024 and all(max(kept[path]) == size for path, size in sizes.items()):
            warnings.warn(
                f"`shard={shard!r}` spreads nothing of {self.template.name!r}: it cuts weights of "
                f"at least 1,024 numbers, and the largest has {largest:,}. Leave `shard` out.",
                stacklevel=5,
            )

    @classmethod
    def _parallel_adapt(cls, request: engines.Request) -> engines.Request:
        # Older files have an option for statistics of each slice.
        options = dict(request.options)
        if not options.pop("sync_batch_norm", True):
            warnings.warn(
                "The model was saved with sync_batch_norm=False. Every `BatchNormalization` sees "
                "the whole batch now, as on one device.",
                stacklevel=4,
            )
        return dataclasses.replace(request, options=options)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """How many elements each device keeps of a weight, by the weight's path.

        With `shard="optimizer"`: of each of the weight's slots. Empty without `shard` and
        `model_devices`.
        """
        return self._parallel_runner.placement

    def explain(self) -> str:
        """What one device computes alone in each step of `function`, by layer and operation.

        Steps of one name have numbers: `step`, `step (2)`.

        Returns:
            A table, as text.
        """
        return self._parallel_runner.explain()

    def _parallel_least_bytes(self, rows: int) -> int | None:
        """As in every mode, but tables whose rows are spread over the devices need not cross.

        Not known with `model_devices`: parts of outputs cross, too.
        """
        if self._parallel_options["model_devices"] > 1:
            return None
        kept = self.placement
        tables = [
            one
            for one in self.trainable_variables
            if hasattr(one, "names_rows_once")
            and one.path in kept
            and max(kept[one.path]) < math.prod(one.shape)
        ]
        whole = super()._parallel_least_bytes(rows)
        return whole and whole - 2 * variables_bytes(tables) * (len(self.devices) - 1)

    def _parallel_describe(self) -> str:
        width = self._parallel_options["model_devices"]
        count = len(self.devices) // width
        text = f"{super()._parallel_describe()}: {number_of(count, 'replica')}"
        text = text if width == 1 else f"{text}, each on {width} devices"
        shard = self._parallel_options["shard"]
        return f"{text}, shard={shard!r}" if shard else text

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._parallel_parts.at_rest():
            return super()._parallel_call_replicas(args, kwargs)

    def _parallel_in_step(self) -> contextlib.AbstractContextManager[None]:
        if self._parallel_runner.partitions_steps:
            return contextlib.nullcontext()
        return self._parallel_parts.in_step()

    def _parallel_retrace(self) -> None:
        super()._parallel_retrace()
        self._parallel_parts.retrace()

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        with self._parallel_parts.at_rest():
            return super().stateless_call(*args, **kwargs)
