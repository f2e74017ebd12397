"""What a call of a template leaves beside its outputs."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu.engines import templates
from keras_multigpu.engines.attributes import get_attributes, set_attributes
from keras_multigpu.engines.structures import take_apart
from keras_multigpu.engines.values import Result


class Noted:
    """A call that notes losses, and what Keras attaches to outputs."""

    def __init__(self, template: keras.Model):
        self._template = template
        self._restore: Any = None
        self._names: list[list[str]] = []

    def call(self, args: Any, kwargs: Any) -> Any:
        """Tensors of the outputs, of what is attached to them, and of the losses."""
        template = self._template
        templates.forget_losses(template)
        tensors, self._restore = take_apart(template(*args, **kwargs))
        attached = list(map(get_attributes, tensors))
        self._names = [list(one) for one in attached]
        penalties = [one for one in template.trainable_weights if one.regularizer is not None]
        losses = template.losses
        losses = losses[: len(losses) - len(penalties)]
        templates.forget_losses(template)
        return tensors, [list(one.values()) for one in attached], losses

    def result(self, tensors: Any, attached: Any, losses: Any) -> Result:
        """The call's result, of the tensors that the devices computed."""
        for one, names, values in zip(tensors, self._names, attached):
            set_attributes(one, dict(zip(names, values)))
        return Result(self._restore(tensors), losses=losses)
