"""What the engines share: seeds, checks, structures of tensors, and a way out of scopes."""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import keras
from keras.src.backend.common import global_state  # noqa: TID251  has no public form

from keras_multigpu.engines.values import Tensor

LARGE_BATCH = 2048
"""Rows. Without a compiler a table stays on its device if so many examples name less than it has.

Larger batches are known to be so when a step is traced, or rare.
"""

SEED = "seed_generator_state"
"""The name of the variables in which Keras keeps the seeds of random layers."""

SEED_STEP = 0x9E3779B9
"""Added to the seed of replica i, i times: the golden ratio of 2^32 keeps the seeds apart."""


_NO_SCOPES = """
    object_name_uids global_seed_generator custom_objects_scope_dict dtype_policy
    flash_attention traceback_filtering interactive_logging
    """.split()
"""What Keras keeps per thread and is not a scope: the numbers of automatic names, above all."""


_COLORS = re.compile(r"\x1b\[\d+m")


def reason_of(error: Exception) -> str:
    """The text of an error that Keras or TensorFlow explains, without the explanation: one line."""
    text = _COLORS.sub("", str(error)).rpartition("Error encountered:")[2]
    for explanation in ("Arguments received by", " for '{{node"):
        text = text.partition(explanation)[0]
    return " ".join(text.split()).rstrip(".")


def check_alike(states: Sequence[Sequence[keras.Variable]]) -> None:
    """Refuses replicas whose variables differ from the first one's in number, shape or type.

    Raises:
        ValueError: if any differ.
    """
    first, *others = ([(tuple(v.shape), v.dtype) for v in state] for state in states)
    for number, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                "Independent replicas must be built alike: all run by the template's code, with "
                f"weights of their own. Received: variables {first} in the template, and "
                f"{other} in replica {number}. Change the template before it is made parallel."
            )


def state_of_none(variable: keras.Variable) -> ValueError:
    """The error for a variable that replicas assign but that is in no model's `variables`."""
    return ValueError(
        "Independent replicas need separate state, but the template assigns the variable "
        f"{variable.path!r}, which is not in its `variables`: it belongs to a recurrent layer with "
        "`stateful=True`, say, or a variable that no layer tracks. Received: "
        f"a variable of shape {tuple(variable.shape)}. Use `replicas='shared'`, or have a "
        "layer track it."
    )


def unique(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Each variable once: Keras may list the state of a shared seed generator twice."""
    return list({id(variable): variable for variable in variables}.values())


def count_rows(tensor: Tensor) -> Tensor:
    """The length of a tensor's first axis: an `int` if known, else a scalar tensor."""
    return keras.ops.shape(tensor)[0]


def is_array(value: Any) -> bool:
    """Whether a value is a tensor, or can become one."""
    return keras.ops.is_tensor(value) or hasattr(value, "__array__")


def split_tensors(
    structure: Any, is_part: Callable[[Any], bool] = is_array
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a structure, and a function that replaces them."""
    flat = keras.tree.flatten(structure)
    places = [place for place, part in enumerate(flat) if is_part(part)]

    def restore(tensors: Sequence[Tensor]) -> Any:
        restored = list(flat)
        for place, tensor in zip(places, tensors):
            restored[place] = tensor
        return keras.tree.pack_sequence_as(structure, restored)

    return [flat[place] for place in places], restore


def in_fresh_thread(function: Callable[[], Any]) -> None:
    """Calls a function in a new thread, outside the caller's scopes.

    Keras and the backends keep scopes per thread. A variable created in one of Keras's scopes gets
    its value and its device only when the scope ends. What else Keras keeps per thread is handed
    over, and back.
    """
    kept, errors = vars(global_state.GLOBAL_STATE_TRACKER), list[BaseException]()

    def run() -> None:
        here = vars(global_state.GLOBAL_STATE_TRACKER)
        here.update({name: kept[name] for name in _NO_SCOPES if name in kept})
        try:
            function()
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            kept.update({name: here[name] for name in _NO_SCOPES if name in here})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def in_thread(call: Callable[[], Any]) -> futures.Future[Any]:
    """Starts a call in a thread, because a backend may wait in it for ever."""
    future: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _AsksForTraining(keras.Layer):
    """Finds out whether layers that are called now are in training."""

    answer: bool | None = None

    def call(self, inputs: Any, training: Any = None) -> Any:
        object.__setattr__(self, "answer", training)
        return inputs


def is_training() -> bool | None:
    """The `training` that layers called now get from the call around them, if any."""
    layer = _AsksForTraining(autocast=False, name="asks_for_training")
    layer(keras.ops.zeros([1]))
    return layer.answer


def active_scope() -> keras.StatelessScope | None:
    """The `keras.StatelessScope` that is active."""
    return global_state.get_global_attribute("stateless_scope")


def given_value(variable: keras.Variable) -> Tensor | None:
    """A variable's value in the active scope, if it has one there."""
    scope = active_scope()
    return None if scope is None else scope.get_current_value(variable)


@contextlib.contextmanager
def unchanged(model: Any, attribute: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a model and restores it afterwards."""
    before = getattr(model, attribute)
    setattr(model, attribute, value)
    try:
        yield
    finally:
        setattr(model, attribute, before)


@contextlib.contextmanager
def batches_as_in_fit(model: Any) -> Iterator[None]:
    """Scope in which `train_on_batch` gives a step what `fit` does: `(x, y)`, no empty parts."""
    model.make_train_function()
    made = model.train_function

    def function(*given: Any) -> Any:
        *state, batches = given
        return made(*state, (keras.utils.pack_x_y_sample_weight(*one) for one in batches))

    with unchanged(model, "train_function", function):
        yield


@contextlib.contextmanager
def having(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Scope in which a context variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def are_given(variables: Iterable[keras.Variable]) -> bool:
    """Whether variables have values: in a compiled step on JAX, only where a scope gives them."""
    return all(value_of(one) is not None for one in variables)


def value_of(variable: keras.Variable) -> Tensor:
    """A variable's value in its own type; `Variable.value` casts to the calling layer's type."""
    given = given_value(variable)
    return variable._value if given is None else given
