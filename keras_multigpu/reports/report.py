"""What all reports share: a table with settings and notes, and the forms it can take."""

from __future__ import annotations

import abc
import dataclasses
import io
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_multigpu.reports import forms

_PLOTS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a report.

    Args:
        name: its name, in every form.
        unit: the unit of its values, `""` for none.
        format: how to show a value: a Python format (`".2f"`), or a function that returns the
            text, unit included. A missing value, `None`, is shown as `-`.

    Example:
        >>> column = Column("time", "s", ".2f")
        >>> column.heading, column.show(1.5), column.show(None)
        ('time (s)', '1.50', '-')
    """

    name: str
    unit: str = ""
    format: str | Callable[[Any], str] = ""

    @property
    def heading(self) -> str:
        """The name, with the unit in brackets unless each value shows its own."""
        has_unit = self.unit and not callable(self.format)
        return f"{self.name} ({self.unit})" if has_unit else self.name

    def show(self, value: Any) -> str:
        """A value as text."""
        if value is None:
            return "-"
        return self.format(value) if callable(self.format) else format(value, self.format)


class Report(abc.ABC):
    """A table, the settings it was made with, and notes on what it means.

    It prints as text and shows itself as HTML in a notebook. A kind of report passes its rows
    and notes to `super().__init__` and implements `draw`.

    Args:
        title: one line.
        columns: the columns of the table.
        rows: the values, row by row: one for each column, `None` where there is none.
        notes: sentences to print below the table.
        settings: what the figures were measured with: machine, versions, date, by name.

    Raises:
        ValueError: if a row's length differs from the number of columns.

    Example:
        >>> class Times(Report):
        ...     def draw(self, figure):
        ...         figure.subplots().plot([row[0] for row in self.rows])
        >>> columns = [Column("devices"), Column("time", "s", ".1f")]
        >>> print(Times("Two runs", columns, [(1, 8.25), (2, 4.5)], ["Measured once."]))
        Two runs
        <BLANKLINE>
        devices  time (s)
              1       8.2
              2       4.5
        <BLANKLINE>
        Measured once.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        notes: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        self.title = title
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.notes = list(notes)
        self.settings = dict(settings or {})
        for row in self.rows:
            if len(row) != len(self.columns):
                names = [column.name for column in self.columns]
                raise ValueError(
                    f"A row must have a value for each of the columns {names}. Received: "
                    f"row={row!r}. Give `None` where there is no value."
                )

    @abc.abstractmethod
    def draw(self, figure: Any) -> None:
        """Draws the report into an empty `matplotlib.figure.Figure`."""

    def __str__(self) -> str:
        return forms.to_text(self)

    def __repr__(self) -> str:
        return str(self)

    def to_markdown(self) -> str:
        """The report as Markdown, with a table that GitHub and notebooks show."""
        return forms.to_markdown(self)

    def to_html(self) -> str:
        """The report as a self-contained piece of HTML."""
        return forms.to_html(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_html()

    def to_dataframe(self) -> Any:
        """The table as a `pandas.DataFrame`, with the columns' names.

        Its `attrs` hold the `title`, the `units` by column, the `settings` and the `notes`.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError(
                "A pandas table needs pandas, which is not installed. Install it: `pip "
                "install 'keras-multigpu[reports]'`, or print the report, or use `to_json()`."
            ) from error
        frame = pandas.DataFrame(self.rows, columns=[column.name for column in self.columns])
        frame.attrs.update(
            title=self.title,
            units={column.name: column.unit for column in self.columns},
            settings=dict(self.settings),
            notes=list(self.notes),
        )
        return frame

    def to_json(self) -> str:
        """The report as JSON; numbers that JSON doesn't have (`nan`) become `null`.

        Returns:
            An object with `title`, `settings`, `columns` (each with `name` and `unit`), `rows`
            (each an object with a value by column name) and `notes`.
        """
        return forms.to_json(self)

    def plot(self) -> Any:
        """The report as a plot.

        Returns:
            A `matplotlib.figure.Figure`, which needs no display: a notebook shows it, and
            `plot().savefig("report.png")` writes it.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        figure = new_figure()
        self.draw(figure)
        return figure

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the report to a file; the file's ending chooses the form.

        Args:
            path: a name that ends in `.txt`, `.md`, `.html`, `.json`, or, for the plot, in
                `.png`, `.svg` or `.pdf`.

        Raises:
            ValueError: if the name has another ending.
            ImportError: if a plot is asked for and matplotlib is not installed.
        """
        path = pathlib.Path(path)
        texts = {
            ".txt": self.__str__,
            ".md": self.to_markdown,
            ".html": self.to_html,
            ".json": self.to_json,
        }
        suffix = path.suffix.lower()
        if suffix in texts:
            path.write_text(texts[suffix]() + "\n", encoding="utf-8")
        elif suffix in _PLOTS:
            self.plot().savefig(path)
        else:
            raise ValueError(
                f"`path` must end in one of {', '.join([*texts, *_PLOTS])}. Received: "
                f"path={str(path)!r}. Choose the ending of the form that you want."
            )


def new_figure(width: float = 9.0, height: float = 4.0) -> Any:
    """An empty matplotlib figure, `width` x `height` inches, that notebooks show.

    It doesn't use `pyplot`, so it needs no display and leaves the user's figures and settings
    alone. Notebooks show a plain `Figure` only after `pyplot` was imported, hence the subclass.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed. Install it: `pip install "
            "'keras-multigpu[reports]'`, or print the report, or use `to_markdown()`."
        ) from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")
