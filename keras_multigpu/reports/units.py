"""Quantities as text, with three digits and the unit that fits."""

from __future__ import annotations

import math


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
    """Three digits, in the unit that fits.

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


_UNITS = ("kB", "MB", "GB", "TB")
