"""Quantities in readable units, and the parts of text, Markdown, HTML, JSON and plots."""

from __future__ import annotations

import html
import io
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.extras import how_to_install

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B")
_UNITS = ("kB", "MB", "GB", "TB")


def show_seconds(seconds: float) -> str:
    """Three digits, in s or ms."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f} {unit}"


def show_bytes(size: float) -> str:
    """Three digits, in B, kB, MB, GB or TB."""
    size = float(f"{size:.3g}")
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(math.log10(size) // 3), len(_UNITS))
    size, unit = size / 1000**power, _UNITS[power - 1]
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{decimals}f} {unit}"


def read_bytes(name: str, size: Any) -> int:
    """A number of bytes, from a number or a text such as `"24 GB"` or `"80GiB"`.

    Raises:
        ValueError: if it is neither, or not positive.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        power = " kMGT".index(found[2].replace("K", "k") or " ")
        size = float(found[1]) * (1024 if found[3] else 1000) ** power
    is_number = isinstance(size, numbers.Real) and not isinstance(size, bool)
    if not is_number or not 1 <= size < math.inf:
        raise ValueError(
            f"`{name}` must be a number of bytes, or a text with a unit. Received: "
            f"{name}={size!r}. Give `{name}='24 GB'`, for example."
        )
    return int(size)


def one_line(text: str) -> str:
    """Without line breaks, which would end a table row, a list item or a heading."""
    return " ".join(text.splitlines())


def markdown_cell(text: str) -> str:
    """With bars escaped, and backslashes too, so that none escapes a bar's own backslash."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|")
    return "<br>".join(escaped.splitlines())


def html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    """A row of cells, each aligned to its side."""
    row = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for side, cell in zip(sides, cells)
    )
    return f"<tr>{''.join(row)}</tr>"


def json_value(value: Any) -> Any:
    """A value of JSON's kinds; numbers that JSON doesn't have (`nan`) become `None`."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(part) for part in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def new_figure(width: float = 9.0, height: float = 4.0) -> Any:
    """An empty matplotlib figure, `width` x `height` inches, that notebooks show.

    It doesn't use `pyplot`, so it needs no display and leaves the user's figures and settings
    alone. Notebooks show a plain `Figure` only after `pyplot` was imported, hence the subclass.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed. Install the extra `reports`: "
            f"{how_to_install('reports')}. Or print the report, or use `to_markdown()`."
        ) from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")
