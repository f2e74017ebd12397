"""The classes of parallel models: of the mode's kind and of their template's at once."""

from __future__ import annotations

import functools
import types
from typing import Any

import keras

from keras_multigpu import engines


@functools.cache
def parallel_class(mode: Any, template_class: Any) -> Any:
    """The class of a mode's parallel models of templates of one class.

    Args:
        mode: the mode's class.
        template_class: the template's class.
    """
    bases = (mode, *engines.current().mixins, template_class)

    @functools.wraps(template_class.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_replicas(args, kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(call=call, __module__=mode.__module__, __doc__=mode.__doc__)
        if issubclass(template_class, keras.Sequential):
            namespace.update({name: _forward(name) for name in ("add", "pop")})

    made = types.new_class(mode.__name__, bases, exec_body=fill)
    # Keras looks up the name under which a class is saved by the class, and by that name the
    # class that loads it: the mode's own, which makes the other again.
    for cls in (made, mode):
        keras.saving.register_keras_serializable(package="keras_multigpu")(cls)
    return made


def _forward(name: str) -> Any:
    """A method that changes the template, whose replicas are traced anew."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_change(name)
        result = getattr(self.template, name)(*args, **kwargs)
        self._retrace()
        return result

    return method
