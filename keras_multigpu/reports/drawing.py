"""Figures of matplotlib, which is an extra, without a display and without a state of its own."""

from __future__ import annotations

import io
from typing import Any


def new_figure(width: float = 9.0, height: float = 4.0) -> Any:
    """An empty figure of matplotlib that a notebook shows, and shows once.

    It is made without `pyplot`: no display is needed, nothing has to be closed, and the user's
    own figures and settings stay as they are.

    Args:
        width: in inches.
        height: in inches.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> figure = new_figure()
        >>> lines = figure.subplots().plot([1, 2, 4], [1, 2, 3.5])
        >>> figure._repr_png_()[1:4]
        b'PNG'
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed. Install it: `pip install "
            "'keras-multigpu[reports]'`, or print the report, or use `to_markdown()`."
        ) from error

    class NotebookFigure(Figure):
        """A figure that notebooks show where `pyplot` has not been imported, too."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")
