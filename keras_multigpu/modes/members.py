"""Tower mode's independent replicas: how they are made, kept apart, and kept alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import h5py
import keras

from keras_multigpu import engines
from keras_multigpu.modes.committee import clone, set_apart, warn_of_equal
from keras_multigpu.modes.own_losses import OwnLosses
from keras_multigpu.modes.settings import Settings


class Members(OwnLosses):
    """A mixed model whose replicas may be independent: the template and its clones."""

    _parallel_homes: Sequence[str]
    train_function: Any
    _parallel_settings: Settings  # of the template
    _parallel_are_compared = False  # whether their weights were, before a training

    @property
    def clones(self) -> list[keras.Model]:
        """The replicas after the first, if they are independent."""
        return list(self._parallel_clones)

    def _parallel_make_clones(self) -> None:
        self._parallel_settings, clones = Settings(self.template), []
        for number, home in enumerate(self._parallel_homes[1:], 1):
            with engines.current().on_device(home):
                clones.append(clone(self.template, number))
        self._parallel_clones = clones
        self._parallel_follow()  # a configuration doesn't say which weights are frozen

    def _parallel_set_apart(self) -> None:
        """Gives the clones their own numbers again, once they are built."""

        def run() -> None:
            for number, model in enumerate(self._parallel_clones, 1):
                with engines.current().on_device(self._parallel_homes[number]):
                    set_apart(self.template, model, number)

            if self.train_function is not None:  # built by the first step of a training
                self._parallel_compare()

        engines.current().in_fresh_thread(run)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of a training step, as Keras does."""
        if self.built:
            self._parallel_compare()
        return super().make_train_function(force)

    def _parallel_compare(self) -> None:
        """Warns once if members begin a training with equal weights."""
        if self._parallel_clones and not self._parallel_are_compared:
            self._parallel_are_compared = True
            warn_of_equal(self.replicas)

    def _parallel_check_change(self, method: str) -> None:
        if self._parallel_clones:
            raise ValueError(
                "The layers of independent replicas are fixed once they are made. Received: a call "
                f"of `{method}` on a model with {len(self.replicas)} of them. Change the "
                "template's layers, and make it parallel again."
            )

    def _parallel_seen(self, name: str) -> list[keras.Variable]:
        self._parallel_follow()
        return super()._parallel_seen(name)

    def _parallel_follow(self) -> None:
        """Changes what is frozen, and settings, in all replicas as in the template."""
        if self._parallel_clones:
            self._parallel_settings.follow(self._parallel_clones)

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics; those inside layers are the template's, and see the mean of the replicas."""
        hidden = {id(metric) for one in self._parallel_clones for metric in engines.metrics_of(one)}
        return [metric for metric in super().metrics if id(metric) not in hidden]

    @property
    def losses(self) -> list[Any]:
        """The losses of the last call, and the penalties of shared weights.

        The penalties of independent replicas' weights are computed on their devices, and added
        in the call.
        """
        losses = super().losses
        if not self._parallel_clones:
            return losses
        in_replicas = {id(v) for model in self.replicas for v in model.trainable_variables}
        penalized = [v for v in self.trainable_variables if v.regularizer is not None]
        kept = len(losses) - len(penalized)
        penalties = [p for v, p in zip(penalized, losses[kept:]) if id(v) not in in_replicas]
        return losses[:kept] + penalties

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads the weights from a file, as Keras does.

        Raises:
            ValueError: if the file has not the weights of all replicas and of the mix.
        """
        if self._parallel_options["replicas"] == "shared":
            super().load_weights(*args, **kwargs)
            return
        path = args[0] if args else kwargs.get("filepath")
        count, here = _members_in(path), len(self.replicas)
        may_skip = kwargs.get("skip_mismatch") or any(args[1:2])
        if count is not None and (count > here or (count < here and not may_skip)):
            # Keras would leave some out, and say nothing, or fail after it has loaded others.
            raise _refused(path, f"with the weights of {count}, for a committee of {here}.")
        try:
            super().load_weights(*args, **kwargs)
        except ValueError as error:
            raise _refused(path, f"from which Keras could not load all: {error}") from error


def _members_in(path: Any) -> int | None:
    """How many members a weights file has, 1 of a plain model; `None` if it does not say."""
    if not (str(path).endswith(".weights.h5") and os.path.isfile(path) and h5py.is_hdf5(path)):
        return None
    with h5py.File(path, "r") as file:
        return 1 + len(file["clones"]) if "clones" in file else 1


def _refused(path: Any, why: str) -> ValueError:
    """The error for weights of another kind of model."""
    return ValueError(
        "A committee reads the weights of a committee: of as many replicas, with the same mix. "
        f"Received: {path}, {why} Give a plain model's weights to each replica: "
        "`for one in committee.replicas: one.load_weights(path)`."
    )
