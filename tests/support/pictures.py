"""Looks at a picture: whether its texts can be read."""

from __future__ import annotations

import io
import itertools
from typing import Any


def hidden_texts(figure: Any) -> list[tuple[str, str]]:
    """The texts beside an axis or in a plot that lie on each other, on a curve, or on the edge."""
    figure.savefig(io.BytesIO(), format="png")  # lays it out
    found = []
    for axes in figure.axes:
        texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts]
        boxes = [(one.get_text(), one.get_window_extent()) for one in texts if one.get_text()]
        found += [
            (text, other)
            for (text, box), (other, beside) in itertools.combinations(boxes, 2)
            if box.overlaps(beside)
        ]
        bottom = axes.get_window_extent().y0
        for one in axes.texts:
            box = one.get_window_extent()
            if box.y0 < bottom < box.y1:
                found.append((one.get_text(), "axis"))
            found += [(one.get_text(), "curve") for line in axes.lines if _crosses(line, box)]
    return found


def _crosses(line: Any, box: Any) -> bool:
    """Whether a curve with points goes through a box."""
    path = line.get_path().transformed(line.get_transform())
    return line.get_marker() != "None" and path.intersects_bbox(box, filled=False)
