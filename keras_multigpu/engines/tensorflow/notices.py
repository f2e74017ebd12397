"""What a user is told of a model's steps: what of them one device computes alone."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines import templates
from keras_multigpu.engines.tensorflow.compiled import names_compiled
from keras_multigpu.engines.tensorflow.partition.errors import told_once
from keras_multigpu.engines.tensorflow.partition.planner import Record
from keras_multigpu.engines.tensorflow.partition.told import (
    SHARE,
    eager_steps,
    explain,
    is_mostly_in,
    share_whole,
    slots_warning,
    warning_of,
)


class Notices:
    """Warns once of each kind; keeps how the operations of each step are computed.

    Args:
        template: the model.
        names: of its devices.
        splits_rows: whether the devices have different rows.
        has_shards: whether they have parts of weights.
    """

    def __init__(
        self,
        template: keras.Model,
        names: Sequence[str],
        *,
        splits_rows: bool,
        has_shards: bool = False,
    ):
        self._template, self._names, self._splits_rows = template, list(names), splits_rows
        self._has_shards = has_shards
        self._told: set[str] = set()
        self._told_shares: dict[str, float] = {}  # of steps, that one device computes
        self._records: dict[str, list[Record]] = {}  # by the name of the step
        self._compiled: set[str] = set()  # the steps which one device computes because XLA does
        self._owners: dict[str, weakref.ref[Any]] = {}  # whose steps have the names

    def name_for(self, owner: Any, name: str) -> str:
        """A name for an owner's step that no other owner has: `step`, `step (2)` and so on."""
        names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        free = (one for one in names if self._owners.get(one, lambda: None)() in (None, owner))
        found = next(free)
        self._owners[found] = weakref.ref(owner)
        return found

    def warn(self, kind: str, text: str | None) -> None:
        """Warns, once of each kind."""
        if text is not None and kind not in self._told and len(self._names) > 1:
            self._told.add(kind)
            warnings.warn(text, stacklevel=2)

    def note(self, name: str, records: list[Record], graph: tf.Graph | None = None) -> None:
        """Notes how a step, or a call, is computed; `graph` is what was traced of it.

        Warns of what one device computes, again if it is more when a step is traced again.
        """
        self._records[name] = records
        self._compiled.discard(name)
        if not self._splits_rows or len(self._names) == 1:
            return
        layers, title = self._layers(), name.replace("_", " ")
        share = share_whole(records, layers)
        if graph and share > SHARE and is_mostly_in(names_compiled(graph), records, layers):
            self._compiled.add(name)
        if share > self._told_shares.get(name, 0.0) + SHARE:
            is_compiled = name in self._compiled
            text = warning_of(records, layers, self._template.name, title, is_compiled=is_compiled)
            if text is not None:
                self._told_shares[name] = share
                warnings.warn(text, stacklevel=3)

    def _layers(self) -> list[str]:
        return [layer.name for layer in templates.all_layers(self._template)]

    def warn_of_slots(self, name: str) -> None:
        """Warns if a step changes whole variables beside weights in parts."""
        self.warn("slots", slots_warning(self._records[name], self._template.name))

    def warn_of_eager_steps(self) -> None:
        """Warns that a step runs eagerly, and so on one device."""
        are_all = tf.config.functions_run_eagerly()
        self.warn("eager steps", eager_steps(self._template.name, self._names[0], are_all))

    def warn_of_eager_calls(self) -> None:
        """Warns of a call whose gradients are taken: single predictions cost little."""
        self.warn(
            "eager calls",
            f"{self._template.name!r} is called eagerly under a tape, and so runs on "
            f"{self._names[0]!r} alone: only a graph can be spread over devices. Put the step "
            "into a function: `step = parallel.function(step)`.",
        )

    def warn_of_first_devices(self, width: int) -> None:
        """Warns of a call under a tape, which only so many devices of a mesh compute."""
        self.warn(
            "calls",
            f"{self._template.name!r} is called under a tape, and so runs on {width} of its "
            f"{len(self._names)} devices: with `model_devices` only a step can be spread over all. "
            "Put it into a function: `parallel.function(step)`.",
        )

    def warn_of_whole_calls(self, why: str) -> None:
        """Warns of a call that one device computes."""
        name = self._template.name
        self.warn("structures", f"{name!r} runs on {self._names[0]!r} alone: {why}.")

    def errors_told_once(self) -> Any:
        """Scope, or decorator, of what runs steps."""
        return told_once(lambda: itertools.chain(*self._records.values()))

    def explain(self) -> str:
        """What of each step that has run is computed by one device alone."""
        if len(self._names) == 1:
            return "There is one device: it computes all of each step."
        if not self._records:
            return (
                "No step has run as a graph yet: call `fit`, or what `parallel.function(step)` "
                "returns. Steps that run eagerly run on one device."
            )
        names = self._layers()
        return "\n\n".join(
            explain(
                one, names, step, has_shards=self._has_shards, is_compiled=step in self._compiled
            )
            for step, one in self._records.items()
        )
