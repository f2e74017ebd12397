"""The error for hosts that can't be used, and what it says of processes that differ."""

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

DIFFERENCES = {
    "rows": (
        "Its rows and those of process {other} differ at step {step}.",
        "Give the same data, in the same order and with the same `batch_size`, in all processes: "
        "each takes its part. Data that shuffle themselves need the same seed in all. (For data "
        "that differ, see `join(data='parts')`.)",
    ),
    "weights": (
        "Its weights and those of process {other} differ at step {step}.",
        "Build the model with the same seed in all processes (`keras.utils.set_random_seed` after "
        "`join`), or load the same file. Change weights and settings in all processes alike.",
    ),
    "values": (
        "Its state and that of process {other} differ at step {step}: its is {its}, and that of "
        "process {other} is {first}.",
        "Change weights, learning rates and other settings in all processes alike: a callback that "
        "does so must run in all of them, and decide by what is the same in all.",
    ),
    "steps": (
        "It makes another step than process {other} at step {step}: its is {its!r}, and that of "
        "process {other} is {first!r}.",
        "Make the same steps in all processes: a callback that trains, evaluates or predicts, or "
        "sets a variable, must do so in all of them, and the data must have the same number of "
        "batches in all.",
    ),
    "passes": (
        "It is at another place in its data than process {other} at step {step}: at {its}, and "
        "process {other} at {first}.",
        "Give each process a part of the data with the same number of batches.",
    ),
    "programs": (
        "It computes something else than process {other} at step {step}: {its}; there {first}.",
        "Build and compile the same model in all processes. Layers, losses and steps that ask for "
        "the number of their process, its files or its environment must compute the same in all, "
        "and the elements of a `set` come in another order in each process.",
    ),
    "parts": (
        "Its part of a batch does not fit to that of process {other} at step {step}: it is {its}, "
        "and that of process {other} is {first}.",
        "Give all processes parts of the same structure, with the same types and the same shape of "
        "a row. Only the number of rows may differ.",
    ),
}
"""What is wrong, and its cure.

`its` and `first` are what the named process and the other one have told of themselves.
"""

TOLD_ALIKE = {
    "weights": "the same, to these digits",
    "values": "the same, to these digits",
    "programs": "the same with another constant or setting",
}
"""What to tell of the other one where both tell the same."""

SAME_CALLS = {
    "same": "Give the same data, with the same number of batches, and make the same calls, in all "
    "processes.",
    "parts": "Give each process a part of the data with the same number of batches, and make the "
    "same calls in all processes.",
}
"""The cure for other steps or calls, by what each process gives to a step."""
