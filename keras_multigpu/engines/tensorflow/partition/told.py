"""What of a step is computed whole, and why: for people."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.tensorflow.partition.planner import Record, total_work

# What is worth a warning: a share of a step's work, and floating-point operations at 32 rows.
SHARE, LEAST = 0.05, 1e6
_COMPILED = (
    "It is within a `tf.function(jit_compile=True)`: leave that out, and pass `jit_compile=True` "
    "to `parallel.function` or `compile`."
)
_INDEPENDENT = (
    "`parallel.explain()` lists what is not spread; operations whose rows are independent, along "
    "another axis than the batch, are."
)
_NOT_LAYERS = ("gradient_tape", "compile_loss", "while", "body", "cond")


def share_whole(records: Sequence[Record], names: Sequence[str]) -> float:
    """The share of a step's work that one device does for rows."""
    return sum(share for _, _, share in by_layer(records, names))


def is_mostly_in(
    operations: Collection[str], records: Sequence[Record], names: Sequence[str]
) -> bool:
    """Whether most of what one device does for rows is in operations of these names."""
    alone = _alone(records, names)
    return 2 * total_work([one for one in alone if one.name in operations]) > total_work(alone)


def _alone(records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """What one device does for rows."""
    # Rows of tables that an optimizer changes are where the table is, like weights.
    return [
        one
        for one in records
        if one.how == "gathered" or (one.how == "lost" and layer_of(one.name, names) in names)
    ]


def by_layer(records: Sequence[Record], names: Sequence[str]) -> list[tuple[str, str, float]]:
    """Layers, types of operations and shares of the work that one device does; most work first."""
    total = total_work(records) or 1.0
    found: dict[tuple[str, str], float] = collections.defaultdict(float)
    for record in _alone(records, names):
        found[layer_of(record.name, names), record.type] += record.work / total
    rows = [(layer, kind, share) for (layer, kind), share in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def layer_of(name: str, layers: Sequence[str]) -> str:
    """The layer that an operation belongs to, by the operation's name."""
    parts = [part for part in name.split("/") if part not in _NOT_LAYERS]
    for part in reversed(parts[:-1]):
        for layer in layers:
            if part == layer or (part.startswith(f"{layer}_") and part[len(layer) + 1 :].isdigit()):
                return layer
    return parts[0] if len(parts) > 1 else "the step"


def explain(
    records: Sequence[Record],
    names: Sequence[str],
    step: str,
    *,
    has_shards: bool = False,
    is_compiled: bool = False,
) -> str:
    """A table of what one device computes for all.

    Args:
        records: of the step.
        names: of layers.
        step: its name.
        has_shards: whether other devices have parts of weights.
        is_compiled: whether most of it is in a function that XLA has to compile.
    """
    of_rows = [record for record in records if record.how != "whole"]
    share = share_whole(of_rows, names)
    if not of_rows:
        return f"{step}: nothing in it has rows, and so one device computes it."
    head = f"{step}: {1 - share:.1%} of the work on rows is spread over the devices"
    rows = [row for row in by_layer(of_rows, names) if row[2] >= 0.0005]
    cause = _cause(records, names, [kind for _, kind, _ in rows])
    lines = [f"{head}; one device does the rest, on gathered rows{cause}:", ""]
    lines = lines if rows else [f"{head}."]
    width = max((len(row[0]) for row in rows), default=0)
    lines += [f"  {layer:{width}}  {share:6.1%}  {kind}" for layer, kind, share in rows]
    lines += [_COMPILED] if is_compiled else []
    return "\n".join([*lines, *_told_once(records, has_shards=has_shards)])


def _cause(records: Sequence[Record], names: Sequence[str], kinds: Sequence[str]) -> str:
    """The operation that needs all rows, if those that are named only follow it."""
    first = next((one for one in records if one.how == "gathered"), None)
    if first is None or first.type in kinds:
        return ""
    return f", after {first.type} in {layer_of(first.name, names)!r}"


def _told_once(records: Sequence[Record], *, has_shards: bool) -> list[str]:
    """A sentence on what has no rows, which one device computes, if it is much."""
    total = total_work(records) or 1.0
    once = sum(record.work for record in records if record.how == "whole") / total
    if once < SHARE:
        return []
    told = (
        f"One device does what has no rows, such as an optimizer's update: about {once:.0%} of the "
        "step, at 32 rows."
    )
    return [told if has_shards else f"{told} `shard` spreads the update of large weights."]


def slots_warning(records: Sequence[Record], model: str) -> str | None:
    """What to warn of if a step changes whole variables beside weights in parts."""
    names = [record.name for record in records if record.how == "apart"]
    if not names:
        return None
    listed = ", ".join(names[:3]) + (" and others" if names[3:] else "")
    return (
        f"A step of {model!r} changes {number_of(len(names), 'variable')} that one device keeps "
        f"whole, of the shapes of weights in parts: {listed}. If they are an optimizer's, call "
        "`optimizer.build(parallel.trainable_variables)` and `parallel.compile(optimizer)` before "
        "`parallel.function`. If they are another model's, call `make_parallel` for that model, "
        "too, with the same options."
    )


COMPILED_AROUND = (
    "XLA compiles the function that calls it for one device. Leave `jit_compile=True` out there; "
    "`parallel.function(step, jit_compile=True)` compiles a step for all"
)


def eager_steps(model: str, device: str, are_all: bool) -> str:
    """What to warn of if a model runs eagerly; `are_all`: as all functions do."""
    cure = "Call `tf.config.run_functions_eagerly(False)`."
    return (
        f"{model!r} runs eagerly, and so on {device!r} alone: only the graph of a step can be "
        f"spread over devices. {cure if are_all else 'Compile it with `run_eagerly=False`.'}"
    )


def warning_of(
    records: Sequence[Record],
    names: Sequence[str],
    model: str,
    step: str,
    *,
    is_compiled: bool = False,
) -> str | None:
    """What to warn of; `None` if one device does little. `is_compiled`: as for `explain`."""
    share = share_whole(records, names)
    if share <= SHARE or share * total_work(records) < LEAST:
        return None
    rows = by_layer(records, names)
    layers = list(dict.fromkeys(repr(row[0]) for row in rows))[:3]
    kinds = list(dict.fromkeys(row[1] for row in rows))[:3]
    where = ", ".join(layers) + _cause(records, names, kinds)
    return (
        f"{share:.0%} of a {step} of {model!r} runs on one device, on the rows of all: "
        f"{', '.join(kinds)} in {where}. The numbers are those of one device. "
        f"{_COMPILED if is_compiled else _INDEPENDENT}"
    )
