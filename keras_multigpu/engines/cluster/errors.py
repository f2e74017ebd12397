"""The error for hosts that can't be used."""

from __future__ import annotations

from typing import Any


class ClusterError(RuntimeError):
    """A host of a cluster can't be used, or can't be used any longer.

    Args:
        host: the host's address, as the user wrote it.
        problem: what is wrong, a sentence.
        cure: how to fix it, a sentence.

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


OF_ONE_PROCESS = (
    "`parallel.function` needs devices of one process. Received: a model over joined processes, "
    "which compare steps of `fit` only. Write a `train_step` and call `fit`."
)
"""The error for a step that `parallel.function` would run in several processes."""
