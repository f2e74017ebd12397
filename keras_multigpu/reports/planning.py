"""How to train a model on n devices so that it fits, and is fast."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import number_of, positive_integer
from keras_multigpu.devices import choose_devices
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.graphs.graph import is_graph
from keras_multigpu.reports.forms import read_bytes, show_bytes, tell_unknown
from keras_multigpu.reports.interconnect import Link
from keras_multigpu.reports.loads import check_rows
from keras_multigpu.reports.models import random_state_kept
from keras_multigpu.reports.plan_report import PlanReport
from keras_multigpu.reports.search import Kind, Search
from keras_multigpu.reports.subject import Subject
from keras_multigpu.reports.workload import Cut, Shard, Sizes

SHARDS = ("weights", "optimizer")
_NO_NEED = (
    "Recomputing activations (`keras.RematScope`) is not tried: a way that needs none fits, and is "
    "faster."
)
_WORTH_IT = 0.97  # of a step's memory: recomputing that saves less is no choice
_PASSED_BY_NAME = {"training", "mask"}  # which Keras passes by name


def plan(
    model: keras.Model,
    batch_size: int,
    n_gpus: int,
    *,
    memory: str | float,
    link: str | Link | None = None,
    step_seconds: float | Mapping[int, float] | None = None,
    speed: float = 1.0,
    inputs: Any = None,
    targets: Any = None,
    cuts: Mapping[int, Cut] | None = None,
    overlap: float = 0.0,
    steps: int = 10,
    verbose: int = 1,
) -> PlanReport:
    """Finds the ways to train a model on n devices that fit into their memory, the fastest first.

    One device is always among the ways: more are not always faster. A way is a mode, what it
    spreads over the devices (`shard`), in how many parts a batch is computed, and whether
    activations are computed again in the backward pass (`keras.RematScope`), not kept: tried if no
    way fits without it, on whole batches. The parts
    of a batch have their gradients accumulated, so that an update still sees the whole batch. What
    compares or counts the rows of a batch (`BatchNormalization`, contrastive losses, means over
    masks or weights) sees the part. The devices need not be here.

    The memory is counted as by `reports.memory`, on one device, for the rows that a device gets and
    for fewer; that of several devices is estimated from it. If as many devices are here, virtual
    ones too, the memory of the fastest way that fits is counted on them. Times are predicted as by
    `advise`, which explains the arguments that are not here.

    Args:
        model: a built model, compiled if it is to be counted with its own optimizer. Its state is
            restored afterwards.
        batch_size: rows of a batch, on all devices together.
        n_gpus: the number of devices.
        memory: the memory of a device: bytes, or a text such as `"24 GB"`. Leave some of it to the
            backend: a tenth, if nothing better is known.
        link: the link between the devices.
        step_seconds: the time of a step on one device in seconds.
        speed: how many times as fast a device is as the one that is measured here.
        inputs: `batch_size` rows of inputs.
        targets: as many rows of targets; needed by a model whose own `train_step` takes them.
        cuts: how mode `"model"` divides the model, by the number of devices. Without it mode
            `"model"` is only considered on JAX if so many devices are here, and on TensorFlow for
            Sequential and functional models.
        overlap: the share of the copies that computations hide.
        steps: the least number of steps to time.
        verbose: 1 for the number of steps that were counted, 0 for silence. Each is traced, and
            takes as long as the first step of a training.

    Returns:
        A report with a row for each way. `plan.best` has the arguments of the fastest one that
        fits: `make_parallel(model, **plan.best)`.

    Raises:
        ValueError: as `advise` does, or if `memory` is no number of bytes.

    Example:
        >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        >>> model.compile("adam", "mse")
        >>> nvlink = {"link": "nvlink4", "step_seconds": 0.01}
        >>> found = plan(model, 64, 2, memory="1 GB", **nvlink, verbose=0)
        >>> found.best
        {'n_gpus': 2, 'mode': 'data'}
    """
    count, limit = positive_integer("n_gpus", n_gpus), read_bytes("memory", memory)
    subject = Subject(
        model, batch_size, (count,), (), link=link, step_seconds=step_seconds, speed=speed,
        inputs=inputs, targets=targets, cuts=cuts, overlap=overlap, steps=steps,
    )  # fmt: skip
    subject.progress = keras.utils.Progbar(None, verbose=verbose, unit_name="counted step")
    kinds, notes = _find_kinds(subject, count)
    search = Search(subject, count, kinds, limit)
    rows = min(subject.rows, subject.most_rows)
    subject.measure(rows, max(rows // 2, 1), {})
    plain = search.count(model)
    ways = search.find(plain)
    choices, why_not = search.choose(ways), [_NO_NEED]
    if not any(one.fits and one.parts == 1 for one in choices):
        recomputed, why_not = _count_recomputed(search, plain)
        choices = search.choose([*ways, *search.find(recomputed, remat=True)])
    subject.progress.update(len(subject.held), finalize=True)
    notes += [*_estimated(subject), *why_not, *(subject.doubts if count > 1 else [])]
    if any(one.parts > 1 for one in choices):
        notes += _changes(model)
    if not any(one.fits for one in choices):
        notes += _not_counted(count)
    left_out = "they are left out, and a step needs more than this."
    notes = [*tell_unknown(plain[subject.rows].unknown, left_out), *notes]
    settings = {**subject.describe(), "memory of a device": show_bytes(limit)}
    return PlanReport(choices, count, limit=limit, settings=settings, notes=notes)


def _estimated(subject: Subject) -> list[str]:
    """Says so if a step on the whole batch is not counted."""
    if subject.most_rows >= subject.batch_size:
        return []
    return [
        f"A step on {number_of(subject.most_rows, 'row')} is the largest that a processor counts. "
        "What more rows need is estimated from it."
    ]


def _find_kinds(subject: Subject, count: int) -> tuple[list[Kind], list[str]]:
    """What to do on one device, and on several; and why other kinds are left out."""
    one: Kind = ("data", None, 1)
    if count == 1:
        return [one], []
    kinds, notes = [one], list[str]()
    try:
        check_rows(count, subject.batch_size)
        shards, notes = _find_shards(subject.model, count)
        kinds += [("data", shard, count) for shard in shards]
    except ValueError as reason:
        notes.append(f"Mode 'data' is left out: {reason}")
    try:
        if count not in subject.cuts:
            _refuse_placement(subject, count)
        kinds.append(("model", None, count))
    except (UserWarning, ValueError) as reason:
        notes.append(f"Mode 'model' is left out: {reason}")
    return kinds, notes


def _find_shards(model: keras.Model, count: int) -> tuple[list[Shard | None], list[str]]:
    """What this backend can spread, and why it leaves out the rest."""
    runner = engines.current().data_runner
    found: list[Shard] = []
    left_out: dict[str, list[str]] = {}  # by the reason
    for name in SHARDS:
        request = engines.Request("data", model, choose_devices(None, None)[:1], {"shard": name})
        try:
            runner.check(request)
            shard = _shard_of(name, *runner.fullest(model, count, name))
            if min(shard.weights, shard.slots) == 1.0:
                why = runner.why_whole(model, count) or "No weight is large enough to be cut."
                left_out.setdefault(why, []).append(f"shard={name!r}")
            elif all(dataclasses.replace(one, name=name) != shard for one in found):
                found.append(shard)
        except ValueError as error:
            why = f"{str(error).partition('. ')[0]}."
            left_out.setdefault(why, []).append(f"shard={name!r}")
    return [None, *found], [
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {why}"
        for why, names in left_out.items()
    ]


def _refuse_placement(subject: Subject, count: int) -> None:
    """Raises the error, or the warning, that says why mode `"model"` is left out, if it is."""
    here = choose_devices(None, None)
    request = engines.Request("model", subject.model, (*here, *here[:1] * count)[:count], {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engines.current().model_runner.check(request)
    subject.find_cut(count, subject.batch_size, subject.sizes)


def _not_counted(count: int) -> list[str]:
    """Where to look if nothing fits: at what divides each large layer, beside mode `"model"`."""
    ways = [] if engines.current().partitions else ["mode='model', placement='spread'"]
    if count % 2 == 0 and (ways or count > 2):
        ways.append("model_devices=2")
    if count == 1 or not ways:
        return []
    return [
        f"Not counted here: {' and '.join(ways)}, which divide{'s' * (len(ways) == 1)} each large "
        f"layer. Count with `reports.memory(make_parallel(model, {count}, {ways[0]}), batch)`."
    ]


def _changes(model: keras.Model) -> list[str]:
    """What a batch in parts changes in a training."""
    kind = keras.layers.BatchNormalization
    names = [one.name for one in engines.all_layers(model) if isinstance(one, kind)]
    if not names:
        return []
    named = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return [
        f"A batch in parts is another training: {named} normalize by the rows of a part. Take a "
        "way with 1 part to train as before."
    ]


def _shard_of(name: str, weights: float, slots: float, kept: Sequence[keras.Variable]) -> Shard:
    """A value of `shard`, from what the fullest device keeps with it."""
    tables = [one for one in kept if one.trainable]
    return Shard(
        name,
        weights,
        slots,
        tables=variables_bytes(tables),
        table_gradients=variables_bytes(one for one in tables if not one.names_rows_once),
        sums=sum(variables_bytes([one]) // one.shape[0] for one in tables),
    )


def _count_recomputed(
    search: Search, plain: Mapping[int, Sizes]
) -> tuple[Mapping[int, Sizes], list[str]]:
    """The sizes of a copy with layers made in a `keras.RematScope`, or why it is left out."""
    model, rows = search.subject.model, search.subject.rows
    if not is_graph(model):
        return {}, [
            "Recomputing activations is left out: only functional and Sequential models are copied "
            "for it. Make your layers in `keras.RematScope`, and plan again."
        ]
    try:
        search.recomputing = _copy_recomputing(model)
    except Exception as error:  # a user's class may raise anything; the note says it
        why = engines.reason_of(error).rpartition("Exception encountered: ")[2].partition(". ")[0]
        return {}, [
            "Recomputing activations (`keras.RematScope`) is left out: no equal model can be made "
            f"from the configuration of this one and its optimizer ({why})."
        ]
    try:
        found = search.count(search.recomputing)
    except Exception as error:  # of many types: the same steps were counted without it before
        return {}, [_why_not_recomputed(model, error)]
    reduced, whole = (
        (sizes[rows].working or 0) + rows * sizes[rows].activations for sizes in (found, plain)
    )
    if reduced > _WORTH_IT * whole:
        return {}, ["Recomputing activations (`keras.RematScope`) saves hardly any memory."]
    return found, []


def _copy_recomputing(model: keras.Model) -> keras.Model:
    """A copy of a model that computes activations again, compiled with the same loss."""

    def copy_layer(layer: keras.Layer) -> keras.Layer:
        with keras.RematScope("full"):
            return type(layer).from_config(layer.get_config())

    is_compiled = model.compiled
    try:
        model.compiled = False  # else Keras compiles the copy from names: of registered losses only
        with random_state_kept():
            copy = keras.models.clone_model(model, clone_function=copy_layer)
    finally:
        model.compiled = is_compiled
    if is_compiled:
        own = model.optimizer
        optimizer = own and type(own).from_config(own.get_config())
        # Not `copy.compile`: the class may have a custom one.
        keras.Model.compile(copy, optimizer, model.loss, jit_compile=model.jit_compile)
    return copy


def _why_not_recomputed(model: keras.Model, error: Exception) -> str:
    """Why activations can't be computed again; `error` is what Keras says of a copy that does."""
    left_out = "Recomputing activations (`keras.RematScope`) is left out"
    kinds = {
        type(layer).__name__
        for layer in engines.all_layers(model)
        if not isinstance(layer, keras.Model)
        and _PASSED_BY_NAME & inspect.signature(layer.call).parameters.keys()
    }
    why = f"which has layers with an argument `training` or `mask` ({', '.join(sorted(kinds))})"
    if not kinds:
        why = f"which fails ({engines.reason_of(error)})"
    return f"{left_out}: on {engines.current().title} Keras can't do it for this model, {why}."
