"""What reports show: quantities with units, figures, and what was measured on."""

from __future__ import annotations

import collections
import datetime
import importlib
import io
import math
import numbers
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import number_of
from keras_multigpu.extras import how_to_install
from keras_multigpu.version import __version__

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)
_DIGIT = 0.03  # of the length of an axis that numbers stand at
_UNITS = ("kB", "MB", "GB", "TB")


def show_seconds(seconds: float) -> str:
    """Three digits, in s or ms."""
    return _show(seconds, "s") if seconds >= 0.9995 else _show(1e3 * seconds, "ms")


def show_bytes(size: float) -> str:
    """Three digits, in B, kB, MB, GB or TB."""
    size = float(f"{size:.3g}")
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(math.log10(size) // 3), len(_UNITS))
    return _show(size / 1000**power, _UNITS[power - 1])


def _show(value: float, unit: str) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def listed(values: Iterable[Any]) -> str:
    """Values in words: "2, 4 and 8"."""
    *some, last = map(str, values)
    return " and ".join([", ".join(some), last] if some else [last])


def tell_unknown(count: int, meaning: str) -> list[str]:
    """A note on tensors without a size, if there are any."""
    note = f"The size of {number_of(count, 'tensor')} is known only when the step runs: {meaning}"
    return [note] if count else []


def read_bytes(name: str, size: Any) -> int:
    """The bytes of a device's memory, from a number or a text such as `"24 GB"` or `"80GiB"`."""
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        power = " KMGT".index(found[2].upper() or " ")
        size = float(found[1]) * (1024 if found[3] else 1000) ** power
    is_number = isinstance(size, numbers.Real) and not isinstance(size, bool)
    # A small number without a unit is surely one of gigabytes.
    if not is_number or not (1 if found else 1000) <= size < math.inf:
        raise ValueError(
            f"`{name}` must be a number of bytes, 1000 or more, or a text with a unit. Received: "
            f"{name}={size!r}. Give `{name}='24 GB'`, for example."
        )
    return int(size)


VIRTUAL = "Virtual devices share one processor: their times say nothing about GPUs."


def import_extra(module: str, missing: str, instead: str) -> Any:
    """A module of the extra `reports`; without it an error says what is missing, and what to do."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{missing} Install the extra `reports`: {how_to_install('reports')}. Or print the "
            f"report, or use `{instead}()`."
        ) from error


def new_figure(width: float = 9.0, height: float = 4.0) -> Any:
    """An empty matplotlib figure, `width` x `height` inches, that notebooks show.

    Without `pyplot` it needs no display and leaves the user's figures and settings alone.
    """
    missing = "A plot needs matplotlib, which is not installed."
    plain: Any = import_extra("matplotlib.figure", missing, "to_markdown").Figure

    class NotebookFigure(plain):  # a plain one is shown only after `pyplot` was imported
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")


def draw_bars(
    axes: Any,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    colors: Mapping[str, Any] | None = None,  # of the parts: one, or one for each bar
    texts: Sequence[str] = (),
) -> None:
    """Draws a horizontal bar for each label, made of parts side by side; `texts` at their ends."""
    ends, colors = [0.0] * len(labels), colors or {}
    figure = axes.get_figure()
    figure.set_figheight(max(figure.get_figheight(), 1.4 + 0.22 * len(labels)))
    for part, sizes in parts.items():
        bars = axes.barh(range(len(labels)), sizes, left=ends, label=part, color=colors.get(part))
        ends = [end + size for end, size in zip(ends, sizes)]
    axes.set(xlabel=xlabel, yticks=range(len(labels)), yticklabels=labels, axisbelow=True)
    axes.grid(axis="x", alpha=0.3)
    axes.yaxis.set_inverted(True)
    if texts:
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over a line that crosses it
        axes.bar_label(bars, texts, padding=4, bbox=white)
    room = 1.25 if texts else 1.05
    axes.set(xlim=(0, room * max(0.0, axes.dataLim.x1) or 1.0))


def spread_devices(axes: Sequence[Any], counts: Sequence[int], speedups: Any) -> None:
    """Makes numbers of devices the x of `axes`; if large, it and the speed-ups are logarithmic."""
    is_large = counts[-1] > 8  # the ticks of small numbers would hide each other
    places = np.log2(counts) if is_large else np.array(counts)
    width = _DIGIT * len(str(counts[-1])) * np.ptp(places)
    is_dense = any(np.diff(places) < width)  # numbers side by side would touch each other
    for one in axes:
        if is_large:
            one.set_xscale("log", base=2)
        if is_large and one is speedups:
            one.set_yscale("log", base=2)
            one.yaxis.set_major_formatter(lambda x, _: f"{x:g}" if x >= 1 else f"1/{1 / x:g}")
            one.margins(y=0.15)  # for figures below the points
        else:
            one.set(ylim=(0, 1.08 * one.dataLim.y1))
        one.minorticks_off()
        one.set_xticks(counts, list(map(str, counts)), rotation=90 if is_dense else 0)
        one.set(xlabel="devices")
        one.margins(x=0.1)
        one.grid(alpha=0.3)


def describe_environment(devices: Sequence[str]) -> dict[str, str]:
    """The date, the machine, the named devices and the versions, each in a few words."""
    engine = engines.current()
    kinds = collections.Counter(engine.describe_device(name) for name in devices)
    versions = {
        "Python": platform.python_version(),
        "Keras": keras.__version__,
        engine.title: sys.modules[keras.backend.backend()].__version__,
        "keras_multigpu": __version__,
    }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{count_cores()} processor cores ({platform.machine()})",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def count_cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> float:
    """The bytes of this host's memory that programs may still take; infinite if it does not say."""
    path = pathlib.Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+)", path.read_text()) if path.exists() else None
    return 1024.0 * int(found[1]) if found else math.inf


def are_virtual(devices: Sequence[str]) -> bool:
    """Whether devices are parts of one processor: then their times say nothing about GPUs."""
    hosts, _, names = zip(*(name.rpartition("/") for name in devices))
    is_one = len(devices) > 1 and len(set(hosts)) == 1
    return is_one and all(name.startswith("cpu") for name in names)
