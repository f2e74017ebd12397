"""Simplifies a case while its outcome stays the same."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from .case import Case, Head, Make, Part

_SGD = Make("keras.optimizers.SGD", (("learning_rate", "0.1"),))


def shrink(case: Case, is_same: Callable[[Case], bool], seconds: float = 90.0) -> Case:
    """The simplest case found in the time for which `is_same` holds."""
    end = time.monotonic() + seconds
    tried = set()
    changed = True
    while changed:
        changed = False
        for candidate in simpler(case):
            if time.monotonic() > end:
                return case
            if candidate in tried or candidate == case:
                continue
            tried.add(candidate)
            if is_same(candidate):
                case, changed = candidate, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one part fewer, the largest parts first."""

    for number in range(len(case.heads) if len(case.heads) > 1 else 0):
        kept = case.heads[:number] + case.heads[number + 1 :]
        yield case.having(heads=kept, outputs="single" if len(kept) == 1 else case.outputs)
    for number in range(len(case.trunk)):
        yield case.having(trunk=case.trunk[:number] + case.trunk[number + 1 :])
    yield from _simpler_training(case)
    for number, head in enumerate(case.heads):
        for less in _simpler_head(head):
            yield case.having(heads=(*case.heads[:number], less, *case.heads[number + 1 :]))
    for number, part in enumerate(case.trunk):
        for simple in part.simpler():
            yield case.having(trunk=(*case.trunk[:number], simple, *case.trunk[number + 1 :]))
    if case.n > 2:
        yield case.having(n=2)


def _simpler_training(case: Case) -> Iterator[Case]:
    if case.optimizer != _SGD:
        yield case.having(optimizer=_SGD)
        for less in case.optimizer.simpler():
            yield case.having(optimizer=less)
    if case.wiring != "functional":
        yield case.having(wiring="functional")
    for number in range(len(case.actions)):
        rest = case.actions[:number] + case.actions[number + 1 :]
        if rest:
            yield case.having(actions=rest)
    for name in ("settings", "fit"):
        pairs = getattr(case, name)
        for number in range(len(pairs)):
            yield case.having(**{name: pairs[:number] + pairs[number + 1 :]})
    if case.feeding in ("dataset", "generator"):
        yield case.having(feeding="arrays")
    plainer = tuple(
        dataclasses.replace(source, data=source.plain or source.data) for source in case.sources
    )
    yield case.having(sources=plainer)
    yield case.having(rows=4, batch=4)


def _simpler_head(head: Head) -> Iterator[Head]:
    for name in ("metrics", "weighted"):
        if getattr(head, name):
            yield dataclasses.replace(head, **{name: ()})
    if isinstance(head.loss, Make):
        for less in head.loss.simpler():
            yield dataclasses.replace(head, loss=less)
    yield dataclasses.replace(head, loss="'mse'", metrics=(), weighted=())
    linear = Part((Make("layers.Dense", (("", "2"),)),))
    yield Head((linear,), "rng.normal(size=(rows, 2))")
    for number, part in enumerate(head.parts):
        if len(head.parts) > 1:
            rest = head.parts[:number] + head.parts[number + 1 :]
            yield dataclasses.replace(head, parts=rest)
        for simple in part.simpler():
            parts = (*head.parts[:number], simple, *head.parts[number + 1 :])
            yield dataclasses.replace(head, parts=parts)
