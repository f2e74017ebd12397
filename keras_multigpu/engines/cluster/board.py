"""What processes write for each other: texts by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

BEAT = 1.0
"""Seconds between two signs of life."""


class Board(Protocol):
    """A board that all processes write to and read. Each gives signs of life on it."""

    def write(self, key: str, value: str | None) -> None:
        """Writes an entry, or deletes it if it is `None`; returns at once."""

    def read(self, prefix: str, seconds: float = 0.0) -> dict[str, str]:
        """The entries whose keys start with a prefix, which is removed from the keys.

        With `seconds`, it first waits up to that long for news.
        """

    def silence(self, number: int) -> float:
        """Seconds since the last sign of life of a process; endless if its connection ended."""

    def service_silence(self) -> float:
        """Seconds since news came last, by way of process 0."""

    def stop(self, seconds: float) -> None:
        """Ends its work within some seconds."""


def under(entries: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The entries whose keys start with a prefix, which is removed from the keys."""
    return {
        key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)
    }
