"""A step of one device, traced once and spread over several."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.checks import check_not_distributed
from keras_multigpu.engines.tensorflow.partition.arguments import rows_of
from keras_multigpu.engines.tensorflow.partition.chosen import Chosen
from keras_multigpu.engines.tensorflow.partition.emission import write
from keras_multigpu.engines.tensorflow.partition.forms import Expected, NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Layout, Split, Value
from keras_multigpu.engines.tensorflow.partition.local import Devices
from keras_multigpu.engines.tensorflow.partition.planner import Planner, Record
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of
from keras_multigpu.engines.tensorflow.partition.together import Together
from keras_multigpu.engines.tensorflow.partition.traced import Traced, one_device

_ALL = 1e9  # the work of a whole step that one device does: not counted, and worth a warning
_TOO_FEW = Record("too few rows", "the step/", "gathered", 1.0)  # not worth a warning
_NOT_COMMON = Record("no common rows", "the inputs/", "gathered", _ALL)


@dataclasses.dataclass(frozen=True)
class Where:
    """The devices that make a step, and how.

    Attributes:
        devices: TensorFlow's names.
        compiled: whether XLA compiles what a device computes between two crossings.
        wire_dtype: the type in which weights and their gradients cross; `None` for their own.
        together: joined processes that make the step together; these are this one's devices.
        has_shards: whether the devices have weights in parts.
        splits_rows: whether the rows are split; without, only what meets a weight in parts is.
        width: of a mesh: the devices are in rows of this length, and a slice of the batch is
            computed by those of a row, where the step says which of the first row does what.
        is_part: whether what is written is spread again, as the step of a mesh's first row.
        home: the name of the device that has whole variables; by default the first.
        expected: the number of rows that are split, if only the run knows it.
    """

    devices: Sequence[str]
    compiled: bool = False
    wire_dtype: str | None = None
    together: Together | None = None
    has_shards: bool = False
    splits_rows: bool = True
    width: int = 1
    is_part: bool = False
    home: str | None = None
    expected: Expected = dataclasses.field(default_factory=Expected)

    @property
    def shards_on(self) -> Sequence[str]:
        """The devices that have variables in parts: those of all processes."""
        return self.devices if self.together is None else self.together.devices

    def planner(self, traced: Traced, records: list[Record]) -> Planner:
        """Plans the step for these devices."""
        planner = Planner(RULES, len(self.devices) // self.width, traced.batch, records)
        planner.columns = dict(zip(self.devices, range(self.width)))
        planner.shares, planner.expected = len(self.shards_on) // self.width, self.expected
        planner.is_joined = is_joined = self.together is not None
        planner.splits_all = self.splits_rows and not is_joined
        # XLA compiles anew for other numbers of rows. Other processes don't know them.
        planner.chosen = None if is_joined else Chosen(planner.names, are_fixed=self.compiled)
        return planner

    def write(self, planner: Planner, traced: Traced, count: Any) -> list[Any]:
        """Writes what was planned for `count` rows; returns the step's tensors."""
        options: dict[str, Any] = {"home": self.home, "wire_dtype": self.wire_dtype}
        options |= {"chosen": planner.rows, "has_functions": not self.is_part}
        options["is_compiled"] = self.compiled and not self.is_part
        if self.together is not None:
            given = planner.program, traced, self.devices, self.width, count
            return self.together.write(*given, **options)
        make = functools.partial(Devices, batch=count, **options)
        scope = Devices.mesh(make, self.devices, self.width)
        return write(planner.program, scope, traced.given())


def spread(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[str],
    *,
    records: list[Record] | None = None,
    have_rows: Sequence[bool] | None = None,
    autograph: bool = False,
    are_known: Callable[[Sequence[tf.Variable]], bool] = lambda made: False,
    note_rows: Callable[[Any], None] = lambda rows: None,
    **options: Any,
) -> Any:
    """The result of `step(*args)`, computed by several devices.

    Called while a graph is built. The tensors of `args` that have the batch's rows, by their first
    axis, are split.

    Args:
        step: any function of tensors.
        args: structures of tensors, and of other values.
        devices: TensorFlow's names.
        records: where to note how each operation is computed.
        have_rows: for each leaf of `args`, whether its first axis is the batch; by default it is
            if all first axes are equal.
        autograph: whether to convert Python's control flow, as `tf.function` does.
        are_known: whether the step does the same once variables exist that its trace has made;
            otherwise it is traced again.
        note_rows: takes the number of rows that are split.
        **options: those of `Where`.
    """
    where, leaves = Where(devices, **options), tf.nest.flatten(args)
    together, compiled = where.together, where.compiled
    are_parts = together is not None and together.are_parts
    check_not_distributed(leaves)
    have_rows = have_rows if where.splits_rows else [False] * len(leaves)
    rows = rows_of(leaves if have_rows is None else [*itertools.compress(leaves, have_rows)])
    # One device has not all weights, or XLA draws random numbers, which are others.
    is_spread = where.has_shards or where.width > 1 or compiled
    is_one_row = rows == 1 and is_spread and not are_parts
    if is_one_row or not where.splits_rows or (are_parts and rows is not None):
        rows = "unknown"  # or other processes have others
    records = [] if records is None else records
    are_few = rows in (0, 1)
    if are_few or (rows is None and together is not None and not compiled):
        records[:] = [_TOO_FEW if are_few else _NOT_COMMON]
        if together is None or are_parts:
            note_rows(rows or 0)
            return _on_one_device(step, args, autograph, together)
        records = []  # joined processes compare the plan, and agree on what comes from outside
    if are_few or rows is None:  # no argument has rows, or not the rows of another
        rows, have_rows = "unknown", [False] * len(leaves)
    traced = Traced(
        step, args, rows, have_rows, autograph, compiled, are_parts, is_one_row, are_known
    )
    count = 0 if are_parts else traced.count()
    are_even = traced.are_even(count)
    if together is None:
        note_rows(count)
    else:
        together.note(traced.graph)
        are_even = are_even is True
    cases = [are_even] if isinstance(are_even, bool) else [False, True]
    try:
        plans = [_planned(where, traced, records, are_even=one) for one in cases]
    except NeedsOthers:
        return _on_one_device(step, args, autograph, together)
    writes = [functools.partial(where.write, one, traced, count) for one in plans]
    made = writes[0]() if len(writes) == 1 else tf.cond(are_even, writes[1], writes[0])
    return packed(traced.structure, made, together)


def _planned(where: Where, traced: Traced, records: list[Record], *, are_even: bool) -> Planner:
    """The plan of the step, if ragged tensors `are_even`: have as many rows as the batch, or not.

    Raises `NeedsOthers` if a loop that holds slices of rows needs them whole.
    """
    has_row_loops, rows = True, set[Any]()
    while True:
        planner = where.planner(traced, records)
        records.clear()
        planner.rows |= rows
        planner.has_row_loops = has_row_loops
        try:
            known = traced.inputs(planner, where.shards_on, are_even=are_even)
            results = planner.run_graph(traced.graph, known, traced.graph.outputs)
            layouts: list[Layout] = [WHOLE] * len(results)
            if where.together is not None and where.together.gives_own:
                layouts = _own_rows(planner, traced.structure, results)
            planner.program.outputs = [planner.get(*one) for one in zip(results, layouts)]
        except NeedsOthers:
            at = planner.latest
            kind, name = ("step", "the step/") if at is None else (at.type, at.name)
            records[:] = [Record(kind, name, "gathered", _ALL)]
            if not has_row_loops:
                raise
            has_row_loops = False  # what comes after such a loop may need all rows' lists
        else:
            # All is divided by the same numbers; other sizes have names of this plan.
            found = {one for one in planner.rows if symbols_of([one]) <= {BATCH}}
            if found == rows:
                return planner
            rows = found


def _own_rows(planner: Planner, structure: Any, results: Sequence[Value]) -> list[Layout]:
    """Slices of what has the batch's rows: each process gets those of its own rows."""
    layouts: list[Layout] = []
    rest = iter(results)
    for leaf in tf.nest.flatten(structure):
        parts = tf.nest.flatten(leaf, expand_composites=True)
        for value in itertools.islice(rest, sum(map(_is_tensor, parts))):
            has_rows = planner.unit_of((value.dims or (None,))[0]) is not None
            layouts.append(Split(0) if has_rows and len(parts) == 1 else WHOLE)
    return layouts


def packed(structure: Any, made: Sequence[Any], together: Together | None) -> Any:
    """The step's result, of its tensors; a list of slices is one tensor."""
    rest, own = iter(made), []
    flat: list[Any] = []
    for one in tf.nest.flatten(structure, expand_composites=True):
        tensor = next(rest) if _is_tensor(one) else one
        if isinstance(tensor, list):
            tensor = tf.concat(tensor, 0)
            own.append(tensor)
        flat.append(tensor)
    result = tf.nest.pack_sequence_as(structure, flat, expand_composites=True)
    return result if together is None else together.own(result, own)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def _on_one_device(
    step: Callable[..., Any], args: tuple[Any, ...], autograph: bool, together: Together | None
) -> Any:
    """The step as it is; what it computes on other devices is its own choice."""
    args = args if together is None else together.whole(args)
    with one_device():
        result = tf.function(step)(*args) if autograph else step(*args)
    return result if together is None else together.own(result)
