"""Tower mode's independent replicas: how they are made, kept apart, and kept alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.modes.apart import set_apart, warn_of_equal
from keras_multigpu.modes.committee import clone
from keras_multigpu.modes.own_losses import OwnLosses
from keras_multigpu.modes.settings import (
    changed_settings,
    flags_of,
    follow,
    frozen_apart,
    settings_of,
)


class Members(OwnLosses):
    """A mixed model whose replicas may be independent: the template and its clones."""

    _parallel_homes: Sequence[str]
    train_function: Any
    _parallel_settings: Mapping[int, Mapping[str, Any]]  # of the template's layers
    _parallel_flags: Mapping[int, bool] = {}  # whether these, and their weights, were trained
    _parallel_are_compared = False  # whether their weights were, before a training

    @property
    def clones(self) -> list[keras.Model]:
        """The replicas after the first, if they are independent."""
        return list(self._parallel_clones)

    def _parallel_clone(self, number: int, device: str) -> keras.Model:
        with engines.current().on_device(device):
            return clone(self.template, number)

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
        if not self._parallel_clones:
            return
        before, now = self._parallel_settings, settings_of(self.template)
        self._parallel_settings, changed = now, changed_settings(before, now)
        for model in self._parallel_clones:
            apart = list(frozen_apart(self.template, model, self._parallel_flags))
            follow(self.template, model, changed)
            if apart:
                _warn_of_freezing(model, apart[0])
        self._parallel_flags = flags_of(self.template)


def _warn_of_freezing(model: keras.Model, one: Any) -> None:
    """Warns of a layer, or a weight, that is `trainable` as the template's again."""
    warnings.warn(
        "The members of a committee are frozen and unfrozen as their template is. Received: "
        f"trainable={not one.trainable} for {one.name!r} in the member {model.name!r}, which is "
        "undone. Set it in `parallel.template`, and so in all members: one alone can't be frozen.",
        stacklevel=3,
    )
