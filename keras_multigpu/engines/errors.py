"""The error of hosts that don't answer, or don't fit together."""

from __future__ import annotations

from typing import Any


class ClusterError(RuntimeError):
    """A host of a cluster can't be used, or can't be used any longer.

    Args:
        host: which one: its address, as it was given.
        problem: what is wrong with it, a sentence.
        cure: what to do about it, a sentence.

    Example:
        >>> error = ClusterError("gpu7:2222", "It does not answer.", "Start it again.")
        >>> str(error)
        'gpu7:2222: It does not answer. Start it again.'
        >>> error.host
        'gpu7:2222'
    """

    def __init__(self, host: str, problem: str, cure: str):
        super().__init__(f"{host}: {problem} {cure}")
        self.host = host
        self.problem = problem
        self.cure = cure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.host, self.problem, self.cure)
