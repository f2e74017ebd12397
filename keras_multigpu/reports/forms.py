"""How reports are shown: as text, Markdown, HTML or JSON, with quantities in readable units."""

from __future__ import annotations

import html
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_multigpu.reports.report import Report

_UNITS = ("kB", "MB", "GB", "TB")


def show_seconds(seconds: float) -> str:
    """Three digits, in s or ms.

    Example:
        >>> show_seconds(0.0123), show_seconds(2.5)
        ('12.3 ms', '2.50 s')
    """
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f} {unit}"


def show_bytes(size: float) -> str:
    """Three digits, in B, kB, MB, GB or TB.

    Example:
        >>> show_bytes(123_456_789), show_bytes(2_500), show_bytes(12)
        ('123 MB', '2.50 kB', '12 B')
    """
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(math.log10(size) // 3), len(_UNITS))
    size, unit = size / 1000**power, _UNITS[power - 1]
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{decimals}f} {unit}"


def to_text(report: Report) -> str:
    """Aligned text for a terminal or a log."""
    cells = [[_one_line(cell) for cell in row] for row in _cells(report)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    aligned = [str.rjust if is_right else str.ljust for is_right in _is_right(report)]
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths)).rstrip()
        for row in cells
    ]
    head = "\n".join(map(_one_line, [report.title, *_settings(report)]))
    return _paragraphs([head, "\n".join(lines), "\n".join(map(_one_line, report.notes))])


def to_markdown(report: Report) -> str:
    """Markdown with a table."""
    header, *rows = ([_markdown_cell(cell) for cell in row] for row in _cells(report))
    rules = ["---:" if is_right else "---" for is_right in _is_right(report)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [header, rules, *rows])
    settings = "\n".join(f"- {_one_line(one)}" for one in _settings(report))
    title = f"**{_one_line(report.title)}**"
    return _paragraphs([title, settings, table, *map(_one_line, report.notes)])


def to_html(report: Report) -> str:
    """A self-contained `div`."""
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


def to_json(report: Report) -> str:
    """A JSON object; numbers that JSON doesn't have (`nan`) become `null`."""
    names = [column.name for column in report.columns]
    found = {
        "title": report.title,
        "settings": report.settings,
        "columns": [{"name": column.name, "unit": column.unit} for column in report.columns],
        "rows": [dict(zip(names, row)) for row in report.rows],
        "notes": report.notes,
    }
    return json.dumps(_json_value(found), indent=1, allow_nan=False)


def _cells(report: Report) -> list[list[str]]:
    """The headings and the rows as text."""
    shown = [[c.show(value) for c, value in zip(report.columns, row)] for row in report.rows]
    return [[column.heading for column in report.columns], *shown]


def _is_right(report: Report) -> list[bool]:
    """Whether each column is aligned to the right, because it holds numbers."""
    columns = zip(*report.rows) if report.rows else ([] for _ in report.columns)
    return [
        all(value is None or isinstance(value, numbers.Number) for value in values)
        for values in columns
    ]


def _settings(report: Report) -> list[str]:
    return [f"{name}: {value}" for name, value in report.settings.items()]


def _one_line(text: str) -> str:
    """Without line breaks, which would end a table row, a list item or a heading."""
    return " ".join(text.splitlines())


def _markdown_cell(text: str) -> str:
    """With bars escaped, and backslashes too, so that none escapes a bar's own backslash."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|")
    return "<br>".join(escaped.splitlines())


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    row = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for side, cell in zip(sides, cells)
    )
    return f"<tr>{''.join(row)}</tr>"


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json_value(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(part) for part in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
