"""The forms of a report: text, Markdown, HTML, JSON."""

from __future__ import annotations

import html
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_multigpu.reports.report import Report


def as_text(report: Report) -> str:
    """Aligned text for a terminal or a log."""
    cells = [[_line(cell) for cell in row] for row in _cells(report)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(map(_pad, row, widths, _is_right(report))).rstrip() for row in cells]
    head = "\n".join(map(_line, [report.title, *_settings(report)]))
    return _paragraphs([head, "\n".join(lines), "\n".join(map(_line, report.notes))])


def as_markdown(report: Report) -> str:
    """Markdown with a table."""
    header, *rows = ([_markdown_cell(cell) for cell in row] for row in _cells(report))
    rules = ["---:" if is_right else "---" for is_right in _is_right(report)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [header, rules, *rows])
    settings = "\n".join(f"- {_line(one)}" for one in _settings(report))
    return _paragraphs([f"**{_line(report.title)}**", settings, table, *map(_line, report.notes)])


def as_html(report: Report) -> str:
    """A `div` that needs nothing besides itself."""
    header, *rows = _cells(report)
    sides = ["right" if is_right else "left" for is_right in _is_right(report)]
    settings = "".join(f"<li>{html.escape(line)}</li>" for line in _settings(report))
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    body = "".join(_html_row("td", row, sides) for row in rows)
    return (
        f"<div><p><strong>{html.escape(report.title)}</strong></p>"
        + (f"<ul>{settings}</ul>" if settings else "")
        + f"<table><thead>{_html_row('th', header, sides)}</thead><tbody>{body}</tbody></table>"
        + f"{notes}</div>"
    )


def as_json(report: Report) -> str:
    """An object of JSON; what JSON has no number for (`nan`) is `null`."""
    names = [column.name for column in report.columns]
    found = {
        "title": report.title,
        "settings": report.settings,
        "columns": [{"name": column.name, "unit": column.unit} for column in report.columns],
        "rows": [dict(zip(names, row)) for row in report.rows],
        "notes": report.notes,
    }
    return json.dumps(_plain(found), indent=1, allow_nan=False)


def _cells(report: Report) -> list[list[str]]:
    """The headings and the rows as text."""
    shown = [[c.show(value) for c, value in zip(report.columns, row)] for row in report.rows]
    return [[column.heading for column in report.columns], *shown]


def _is_right(report: Report) -> list[bool]:
    """Whether each column holds numbers, which are set to the right."""
    columns = zip(*report.rows) if report.rows else ([] for _ in report.columns)
    return [
        all(value is None or isinstance(value, numbers.Number) for value in values)
        for values in columns
    ]


def _settings(report: Report) -> list[str]:
    return [f"{name}: {value}" for name, value in report.settings.items()]


def _line(text: str) -> str:
    """A text without line breaks, which would end a row of a table, an item or a heading."""
    return " ".join(text.splitlines())


def _markdown_cell(text: str) -> str:
    """A text as a cell: a bar would end it, and so would a backslash before the bar's own."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|")
    return "<br>".join(escaped.splitlines())


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _pad(cell: str, width: int, is_right: bool) -> str:
    return cell.rjust(width) if is_right else cell.ljust(width)


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    row = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for side, cell in zip(sides, cells)
    )
    return f"<tr>{''.join(row)}</tr>"


def _plain(value: Any) -> Any:
    """A value of types that JSON has."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
