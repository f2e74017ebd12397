"""What all reports share: a table with settings and notes, and the forms it can take."""

from __future__ import annotations

import abc
import base64
import dataclasses
import html
import importlib.util
import json
import numbers
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_multigpu.reports.forms import import_extra, new_figure


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
        return _one_line(f"{self.name} ({self.unit})" if has_unit else self.name)

    def show(self, value: Any) -> str:
        """A value as text."""
        if value is None:
            return "-"
        text = self.format(value) if callable(self.format) else format(value, self.format)
        return _one_line(text)


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
        self.title = _one_line(title)
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.notes = [_one_line(note) for note in notes]
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
        cells, sides = self._cells(), {True: str.rjust, False: str.ljust}
        widths = [max(map(len, column)) for column in zip(*cells)]
        aligns = [sides[one] for one in self._are_numbers()]
        rows = [map(lambda align, *cell: align(*cell), aligns, row, widths) for row in cells]
        table = "\n".join("  ".join(row).rstrip() for row in rows)
        head = "\n".join([self.title, *self._settings()])
        return "\n\n".join(filter(None, [head, table, "\n".join(self.notes)]))

    __repr__ = __str__

    def to_markdown(self) -> str:
        """The report as Markdown, with a table that GitHub and notebooks show."""
        # Backslashes are escaped too, so that none escapes a bar's own backslash.
        cells = [[re.sub(r"([\\|])", r"\\\1", cell) for cell in row] for row in self._cells()]
        rules = ["---:" if is_right else "---" for is_right in self._are_numbers()]
        table = "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], rules, *cells[1:]])
        settings = "\n".join(f"- {one}" for one in self._settings())
        return "\n\n".join(filter(None, [f"**{self.title}**", settings, table, *self.notes]))

    def to_html(self) -> str:
        """The report as a self-contained piece of HTML: what was found, picture, table, settings.

        Raises:
            ImportError: if pandas or matplotlib is not installed.
        """
        picture = base64.b64encode(self.plot()._repr_png_()).decode()
        title = html.escape(self.title, quote=True)
        return self._html(f'<img alt="{title}" src="data:image/png;base64,{picture}">')

    def _repr_html_(self) -> str | None:
        """What a notebook shows, or `None` for the text; `plot` adds the picture."""
        return self._html("") if importlib.util.find_spec("pandas") else None

    def _html(self, picture: str) -> str:
        headings, *rows = self._cells()
        frame = import_extra(*_PANDAS).DataFrame(rows, columns=headings)
        notes = "".join(f"<p>{_html_text(note)}</p>" for note in self.notes)
        lines = "".join(f"<li>{_html_text(line)}</li>" for line in self._settings())
        folded = f"<details><summary>Settings</summary><ul>{lines}</ul></details>" if lines else ""
        title, table = html.escape(self.title), frame.to_html(index=False, border=0)
        return f"<div><p><strong>{title}</strong></p>{notes}{picture}{table}{folded}</div>"

    def _cells(self) -> list[list[str]]:
        """The headings and the rows as text."""
        shown = [[c.show(value) for c, value in zip(self.columns, row)] for row in self.rows]
        return [[column.heading for column in self.columns], *shown]

    def _are_numbers(self) -> list[bool]:
        """Whether a column has numbers only, which are aligned to the right."""
        columns = list(zip(*self.rows)) or [()] * len(self.columns)
        return [all(isinstance(one, numbers.Number | None) for one in values) for values in columns]

    def _settings(self) -> list[str]:
        return [_one_line(f"{name}: {value}") for name, value in self.settings.items()]

    def to_dataframe(self) -> Any:
        """The table as a `pandas.DataFrame`, with the columns' names.

        Its `attrs` hold the `title`, the `units` by column, the `settings` and the `notes`.

        Raises:
            ImportError: if pandas is not installed.
        """
        units = {column.name: column.unit for column in self.columns}
        frame = import_extra(*_PANDAS).DataFrame(self.rows, columns=list(units))
        frame.attrs |= {"title": self.title, "units": units}
        frame.attrs |= {"settings": dict(self.settings), "notes": list(self.notes)}
        return frame

    def to_json(self) -> str:
        """The report as JSON; numbers that JSON doesn't have (`nan`) become `null`.

        Returns:
            An object with `title`, `settings`, `columns` (each with `name` and `unit`), `rows`
            (each an object with a value by column name) and `notes`.
        """
        columns = [{"name": column.name, "unit": column.unit} for column in self.columns]
        rows = [{c.name: value for c, value in zip(self.columns, row)} for row in self.rows]
        found = {"title": self.title, "settings": self.settings, "columns": columns, "rows": rows}
        text = json.dumps({**found, "notes": self.notes}, default=_plain)
        return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1)

    def plot(self) -> Any:
        """The report as a `matplotlib.figure.Figure`, which needs no display.

        A notebook shows it, and `plot().savefig("report.png")` writes it.

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
            ImportError: if pandas or matplotlib is needed, and not installed.
        """
        file = pathlib.Path(path if isinstance(path, os.PathLike) else str(path))
        suffix = file.suffix.lower()
        texts = dict(zip(_TEXTS, (self.__str__, self.to_markdown, self.to_html, self.to_json)))
        if suffix in texts:
            file.write_text(texts[suffix]() + "\n", encoding="utf-8")
        elif suffix in _PLOTS:
            self.plot().savefig(file)
        else:
            raise ValueError(
                f"`path` must end in one of {', '.join([*_TEXTS, *_PLOTS])}. Received: "
                f"path={path!r}. Choose the ending of the form that you want."
            )


_TEXTS, _PLOTS = (".txt", ".md", ".html", ".json"), (".png", ".svg", ".pdf")
_PANDAS = ("pandas", "A pandas or HTML table needs pandas, which is not installed.", "to_json")


def _one_line(text: str) -> str:
    """Without line breaks, which would end a table row, a list item or a heading."""
    return " ".join(text.splitlines())


def _html_text(text: str) -> str:
    """Escaped, with `code` between backticks as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _plain(value: Any) -> Any:
    """What JSON can hold of a value: of NumPy's, the Python numbers; of others, the text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
