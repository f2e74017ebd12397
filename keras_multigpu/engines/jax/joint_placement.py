"""Placements on devices of one process, or of several, which then make each step together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.cluster.places import STEP
from keras_multigpu.engines.jax.cluster import joint, parts
from keras_multigpu.engines.jax.cluster.processes import Group
from keras_multigpu.engines.jax.placement import Placement, is_sparse


@functools.cache
def _placement(names: tuple[str, ...], spread_rows: bool, width: int) -> Placement:
    group = joint.group_of(names)
    if group is None:
        return Placement(names, spread_rows, width)
    return JointPlacement(names, spread_rows, width, group)


def placement_on(names: Sequence[str], spread_rows: bool = True, width: int = 1) -> Placement:
    """The placement on the named devices: one for all callers."""
    return _placement(tuple(names), spread_rows, width)


class JointPlacement(Placement):
    """A placement on devices of several processes; attributes are as in `Placement`."""

    group: Group

    def __init__(self, names: Sequence[str], spread: bool, width: int, group: Group):
        self.group = group
        super().__init__(names, spread, width)

    def compare(self, batch: Any, step: joint.Step) -> list[int]:
        if self.group.data == "parts":
            parts.check(batch)
        self.group.call.steps += 1
        return joint.compare_steps(batch, step, self.mesh, self.group)

    def put_batch(self, batch: Any, counts: Sequence[int] = ()) -> Any:
        if self.group.data == "parts":
            is_spread = self.is_of_rows and self.divides(sum(counts))
            where = self.replicated, self.sharded, self.group
            return parts.put(batch, counts, *where, is_spread=is_spread)
        shardings = jax.tree.map(self.of_rows, batch, is_leaf=is_sparse)
        # A sparse tensor has several arrays.
        put = lambda part, to: jax.tree.map(lambda one: joint.put(one, to), part)  # noqa: E731
        return jax.tree.map(put, batch, shardings, is_leaf=is_sparse)

    def compare_state(
        self, state: Any, assigned: Collection[int], paths: Callable[[], Sequence[str]], name: str
    ) -> None:
        """Raises a `ClusterError` if another process has other values in the state of a step.

        Compared is what is not on all devices yet, and the arrays whose `id`s are `assigned`:
        computed by a process from what is there. `paths` name the arrays, `name` the step.
        """
        leaves = enumerate(jax.tree.leaves(state))
        new = [one for one in leaves if not self.is_on_all(one[1]) or id(one[1]) in assigned]
        if new:
            names, places = dict(enumerate(paths())), [place for place, _ in new]
            named = ((names.get(place, f"array {place}"), leaf) for place, leaf in new)
            listing = Listing.of_values(named, places)
            joint.compare_weights(listing, self.mesh, self.group, name)

    def _put_whole(self, value: Any) -> Any:
        return joint.put(value, self.replicated)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Scope that raises a `ClusterError` if another process is lost."""
        return self.group.explained()

    def finish(self, computed: Any) -> None:
        """Waits for a joint computation of the processes, or for the loss of one."""
        # A process that traces its step anew waits elsewhere for the others.
        place = self.group.calls.here(f"the results of step {self.group.call.begun}")
        with self.group.places.at(f"{STEP} results", place, is_meeting=False):
            self.group.wait(computed)

    def can_read(self, value: jax.Array) -> bool:
        return self.group.broken is None or value.is_ready()

    def outputs(self, outputs: Any) -> Any:
        return joint.copy_to_all(outputs, self.mesh)
