"""Saving and loading of parallel models."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.devices import choose_again
from keras_multigpu.engines.templates import having_method
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.modes.building import build_parallel, making_template
from keras_multigpu.modes.one_model import OneModel


class SavedModel(OneModel):
    """Writes the files that the template would write."""

    _parallel_devices: tuple[str, ...]
    _parallel_options: dict[str, Any]
    _parallel_steps: Any = None  # the engine's `Steps`, once the model is made
    _parallel_asked: Any = None  # the devices: their names, or "all"; `None` for a number

    def get_weights(self) -> list[Any]:
        """The weights as NumPy arrays, as Keras gives them."""
        with self._parallel_steps.reading_weights():
            return super().get_weights()

    def set_weights(self, weights: Any) -> None:
        """Sets the weights from NumPy arrays, as Keras does."""
        with self._parallel_steps.using_weights():
            super().set_weights(weights)

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads the weights from a file, as Keras does."""
        with self._parallel_steps.using_weights():
            super().load_weights(*args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Saves the weights, as Keras does; replaces an existing file at the end.

        Raises:
            OSError: if the file can't be written; an existing file stays unchanged.
        """
        self._parallel_write(super().save_weights, ".weights.h5", filepath, args, kwargs)

    def _parallel_write(
        self, write: Any, ending: str, filepath: Any, args: Any, kwargs: Any
    ) -> None:
        with self._parallel_steps.writing() as is_mine:
            if not is_mine:
                return
            asks = args or kwargs.keys() - {"overwrite"} or not kwargs.get("overwrite", True)
            if asks or not str(filepath).endswith(ending):  # or shards, or Keras refuses
                write(filepath, *args, **kwargs)
                return
            with replacing(filepath, weights_room(self)) as path:
                write(path)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Saves the whole model, as Keras does; replaces an existing file at the end.

        Raises:
            ValueError: for Keras's legacy format, which has no room for a parallel model.
            OSError: if the file can't be written; an existing file stays unchanged.
        """
        if str(filepath).endswith((".h5", ".hdf5")):
            raise _legacy_error(f"filepath={filepath}")
        self._parallel_write(super().save, ".keras", filepath, args, kwargs)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Exports the template for serving, without device names in the graph."""
        with engines.current().weights_whole(self.template):
            return self.template.export(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The template's configuration, the devices and the mode's options.

        Raises:
            ValueError: for Keras's legacy format, however it was requested.
        """
        if _is_in_legacy_format():
            raise _legacy_error(f"the parallel model {self.name!r} for a file of HDF5")
        with _without_compiling(self.template):
            template = keras.saving.serialize_keras_object(self.template)
        return {
            "template": template,
            "num_devices": len(self._parallel_devices),
            "devices": self._parallel_asked,
            **self._parallel_options,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Rebuilds a parallel model: on the devices that it was made for, if they are here.

        On fewer if there are fewer; on all, if it was made for all.

        Raises:
            ValueError: with the text of Keras's `TypeError`, if the template can't be made: its
                class isn't registered, say.

        Warns:
            UserWarning: if there are fewer devices than when it was saved.
        """
        make = functools.partial(
            keras.saving.deserialize_keras_object, custom_objects=custom_objects
        )
        options = copy.deepcopy(config)  # Keras empties the dictionary that it deserializes
        template = options.pop("template")
        options = make(options)
        wanted = options.pop("num_devices")
        mode, asked = cls._parallel_mode_class(), options.pop("devices", None)
        there = choose_again(mode.mode, wanted, asked)
        with making_template(mode, there, options):
            try:
                template = make(template)
            except TypeError as error:  # Keras would put the whole configuration before its text
                raise ValueError(str(error)) from error
        request = engines.Request(mode.mode, template, there, options)
        request = mode._parallel_adapt(mode._parallel_runner_class().adapt(request))
        devices = request.devices
        if len(there) < wanted:
            used = f", of which {len(devices)} can be used" if len(devices) < len(there) else ""
            changes = [
                f" It has {name}={now!r} now, in place of {options[name]!r}."
                for name, now in request.options.items()
                if options.get(name) != now and isinstance(now, (int, str))
            ]
            warnings.warn(
                f"The model was saved on {wanted} devices, and {len(there)} "
                f"{'is' if len(there) == 1 else 'are'} here: {', '.join(there)}{used}. "
                f"{cls._parallel_on_fewer(request.options)}{''.join(changes)}",
                stacklevel=2,
            )
        return build_parallel(mode, request, asked)

    @classmethod
    def _parallel_on_fewer(cls, options: Mapping[str, Any]) -> str:
        """What a model from a file does on fewer devices, in a sentence."""
        if options.get("wire_dtype"):
            return "It computes the same, but for the rounding of `wire_dtype`."
        return "It computes the same on them."

    @classmethod
    def _parallel_adapt(cls, request: engines.Request) -> engines.Request:
        """The request of a file, changed to fit the number of devices."""
        return request

    @classmethod
    def _parallel_mode_class(cls) -> Any:
        """The mode's importable class, the base of this one."""
        return next(base for base in cls.__mro__ if isinstance(vars(base).get("mode"), str))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as Keras does, or what replaces Keras's way, through the importable class."""
        # Not `super()`: a template's own way would make another template.
        rebuild, *state = keras.Model.__reduce__(self)
        if getattr(rebuild, "__self__", None) is type(self):
            rebuild = getattr(self._parallel_mode_class(), rebuild.__name__)
        return (rebuild, *state)

    def save_own_variables(self, store: Any) -> None:
        """Writes the variables that the template holds outside its layers."""
        self.template.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads the variables that the template holds outside its layers."""
        self.template.load_own_variables(store)


def _without_compiling(template: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Scope in which Keras does not ask a template how it is compiled, unless it is.

    A `get_compile_config` of the user's may need what `compile` of the parallel model has set.
    """
    if template.compiled or "get_compile_config" in vars(template):
        return contextlib.nullcontext()
    return having_method(template, "get_compile_config", lambda: None)


def _legacy_error(received: str) -> ValueError:
    return ValueError(
        "A parallel model can't be saved in the legacy HDF5 format. "
        f"Received: {received}. Name the file `.keras`, or save the model on one "
        "device: `model.template.save(...)`."
    )


def _is_in_legacy_format() -> bool:
    """Whether Keras is writing its legacy format, whose configurations are incomplete.

    Keras has no public way to ask, but a model's configuration shows it.
    """
    layers = [keras.layers.Identity(name="any_layer")]
    return "module" not in keras.Sequential(layers, name="any").get_config()["layers"][0]


# HDF5's groups and headers.
_BYTES_PER_VARIABLE = 4096
_BYTES_PER_FILE = 65536
# Full disk, exceeded quota, file too large.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(filepath: Any, room: int = 0) -> Iterator[Any]:
    """Yields a temporary path; at the end, that file replaces the one at `filepath`.

    It reserves `room` bytes first. If it can't be written, an existing file stays unchanged. Yields
    `filepath` itself if that is no local path (an open file, `"gs://..."`), or if Keras refuses its
    ending.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    if "://" in path or not path.endswith((".weights.h5", ".keras")):
        yield filepath
        return
    target = pathlib.Path(os.path.realpath(filepath))
    part = target.with_name(f".{os.getpid()}.part.{target.name}")
    try:
        with part.open("wb") as file:
            if room and hasattr(os, "posix_fallocate"):  # not on every system
                os.posix_fallocate(file.fileno(), 0, room)
        yield str(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except OSError as error:
        if error.errno not in _FULL:
            if error.filename is not None:
                error.filename = str(target)  # not the temporary name, which nobody has given
            raise
        kept = " The previous file is unchanged." if target.exists() else ""
        raise OSError(
            error.errno,
            f"`{target}` could not be written on the host {socket.gethostname()!r}: {error}."
            f"{kept} Free disk space there, and resume from the last file that was saved",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def weights_room(model: keras.Model) -> int:
    """An upper bound, in bytes, of the size of a model's weights file.

    HDF5 crashes the process if the disk gets full during writing (h5py 3.14, a segmentation
    fault), so the room is reserved first.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return variables_bytes(variables) + _BYTES_PER_VARIABLE * len(variables) + _BYTES_PER_FILE
