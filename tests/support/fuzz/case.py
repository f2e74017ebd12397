"""A case: one model and one training, as pieces of Python text.

The fuzzer runs the same text that it writes into a script, so a script repeats its case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Make:
    """A call of a class or function: `layers.Dense(units=3)`.

    Attributes:
        name: what is called, as text.
        arguments: pairs of a keyword (empty for a positional argument) and a value as text.
    """

    name: str
    arguments: tuple[tuple[str, str], ...] = ()

    def __str__(self):
        parts = [f"{name}={value}" if name else value for name, value in self.arguments]
        return f"{self.name}({', '.join(parts)})"

    def simpler(self) -> Iterator[Make]:
        """The same call with one argument fewer."""
        for index in range(len(self.arguments)):
            rest = self.arguments[:index] + self.arguments[index + 1 :]
            yield dataclasses.replace(self, arguments=rest)


@dataclasses.dataclass(frozen=True)
class Part:
    """One step of a model: layers, and how they are called on the tensor so far.

    Attributes:
        makes: the layers.
        form: an expression of `x` in which `{0}`, `{1}` stand for the layers.
        frozen: whether the first layer is set to `trainable = False`.
    """

    makes: tuple[Make, ...]
    form: str = "{0}(x)"
    frozen: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a `Sequential` model can hold it."""
        return self.form == "{0}(x)"

    def simpler(self) -> Iterator[Part]:
        if self.frozen:
            yield dataclasses.replace(self, frozen=False)
        if not self.is_plain:
            yield dataclasses.replace(self, makes=self.makes[:1], form="{0}(x)")
        for index, make in enumerate(self.makes):
            for less in make.simpler():
                makes = (*self.makes[:index], less, *self.makes[index + 1 :])
                yield dataclasses.replace(self, makes=makes)


@dataclasses.dataclass(frozen=True)
class Head:
    """An output: its layers, targets, losses and metrics."""

    parts: tuple[Part, ...]
    target: str
    loss: Any = "'mse'"
    metrics: tuple[Any, ...] = ()
    weighted: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """An input: its symbolic form, and its data, as text with the names `rng` and `rows`."""

    symbol: str
    data: str
    plain: str = ""  # simpler data of the same kind


@dataclasses.dataclass(frozen=True)
class Trial:
    """Other data for a model that was trained: as text, with a seed and a number of rows."""

    data: tuple[str, ...]
    seed: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its training."""

    name: str
    sources: tuple[Source, ...]
    start: str  # the first tensor, as an expression of `i`, the inputs
    trunk: tuple[Part, ...]
    heads: tuple[Head, ...]
    wiring: str = "functional"  # or sequential, lazy, subclassed, nested
    inputs: str = "single"  # or list, dict
    outputs: str = "single"  # or list, dict
    optimizer: Make = Make("keras.optimizers.SGD", (("", "0.1"),))
    settings: tuple[tuple[str, str], ...] = ()  # of compile
    feeding: str = "arrays"  # or dataset, generator, csr
    fit: tuple[tuple[str, str], ...] = ()
    actions: tuple[str, ...] = ("fit",)
    rows: int = 7
    batch: int = 4
    seed: int = 0  # of the data
    n: int = 2
    floatx: str = "float64"
    mode: str = "data"
    options: tuple[tuple[str, str], ...] = ()
    trials: tuple[Trial, ...] = ()

    def fresh(self, number: int) -> Case:
        """The case that trains a new model with a trial's data."""
        trial = self.trials[number]
        pairs = zip(self.sources, trial.data)
        sources = tuple(dataclasses.replace(source, data=data) for source, data in pairs)
        return self.having(sources=sources, rows=trial.rows, seed=trial.seed, trials=())

    def having(self, **changes: Any) -> Case:
        """The case with some attributes changed."""
        return dataclasses.replace(self, **changes)

    @property
    def makes(self) -> list[Make]:
        """All the layers."""
        parts = [*self.trunk, *(part for head in self.heads for part in head.parts)]
        return [make for part in parts for make in part.makes]
