"""Which device each layer of a graph is on: as the user says, or chosen."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_multigpu.models import costs
from keras_multigpu.models.graph import Graph, LayerCall

# Rows of the batch that a placement is chosen for. Work and traffic both grow with them.
_ROWS = 128
# Branches on several devices must save a tenth, by estimate; what saves less is not worth it.
_LEAST_GAIN = 0.9
# How much above the smallest possible the largest stage may be, for a cheaper cut.
_SLACK = 1.1


def check_placement(placement: object, count: int) -> None:
    """Refuses what is no placement on so many devices.

    Raises:
        ValueError: if it is neither `None` nor a dict from names to device numbers.
    """
    expected = (
        "`placement` must be None, or a dict from names of layers, or regular expressions, to "
        f"device numbers from 0 to {count - 1}."
    )
    if placement is None:
        return
    if not isinstance(placement, Mapping) or not placement:
        raise ValueError(f"{expected} Received: placement={placement!r}.")
    for name, number in placement.items():
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if not isinstance(name, str) or not is_number or not 0 <= number < count:
            raise ValueError(
                f"{expected} Received: {name!r}: {number!r}, with {count} devices. Use a number "
                "in that range, or make the model parallel on more devices."
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"{expected} Received: {name!r}, which is no regular expression: {error}. "
                "Escape what is to be taken literally: `re.escape(name)`."
            ) from error


def place_by_names(graph: Graph, placement: Mapping[str, int]) -> list[int]:
    """The device of every call, by the names of layers.

    A name is a layer's own, that of a model it is in, or both with a slash between. Layers that
    are not named are on device 0; operations that are no layers are where their inputs are made.

    Args:
        graph: the graph.
        placement: the devices by names or regular expressions, which match whole names.

    Raises:
        ValueError: if a name matches no layer, or a layer is matched twice.
    """
    numbers: dict[int, int] = {}
    unused = set(placement)
    for place, call in enumerate(graph.calls):
        matched = [key for key in placement if _matches(key, call.path)]
        if len(matched) > 1:
            raise ValueError(
                "Every layer must be matched by one entry of `placement` at most. Received: "
                f"layer {'/'.join(call.path)!r}, which {' and '.join(map(repr, matched))} match. "
                "Make them narrower; they are matched against whole names."
            )
        unused -= set(matched)
        if matched:
            numbers[place] = placement[matched[0]]
    if unused:
        names = ", ".join(dict.fromkeys("/".join(call.path) for call in graph.calls))
        raise ValueError(
            f"Every entry of `placement` must match a layer. Received: "
            f"{', '.join(map(repr, sorted(unused)))}, which match none. The layers are: {names}."
        )
    for place, call in enumerate(graph.calls):
        if place not in numbers and isinstance(call.layer, keras.Layer):
            numbers[place] = 0
    return _with_operations(graph, numbers)


def choose_placement(graph: Graph, count: int) -> list[int]:
    """The device of every call.

    Branches go to different devices where that saves time by estimate: list scheduling of the
    graph's chains by the length of the path that is left (HEFT: Topcuoglu, Hariri and Wu, 2002).
    Otherwise the calls in their order are cut into stages of about the same work and weights,
    where the least crosses: a chain partition by dynamic programming (as in Pinar and Aykanat,
    2004). A layer that is called several times is on one device.

    Args:
        graph: the graph.
        count: how many devices there are.
    """
    if count == 1:
        return [0] * len(graph.calls)
    hardware = costs.Hardware()
    scheduled, span = _schedule(graph, count, hardware)
    alone = sum(costs.seconds(call, _ROWS, hardware) for call in graph.calls)
    numbers = scheduled if span <= _LEAST_GAIN * alone else _cut(graph, count, hardware)
    first: dict[int, int] = {}
    return [first.setdefault(id(c.layer), n) for c, n in zip(graph.calls, numbers)]


def find_share(graph: Graph, numbers: Sequence[int]) -> float:
    """The part of a step's time on one device that a placement takes, by estimate.

    Devices work at once as far as their calls don't wait for each other; copies take no time.

    Args:
        graph: the graph.
        numbers: the device of every call.

    Returns:
        1 for a chain, 1 / n for n equal branches on n devices.
    """
    hardware, producers = costs.Hardware(), graph.producers()
    work = [costs.seconds(call, _ROWS, hardware) for call in graph.calls]
    free: dict[int, float] = collections.defaultdict(float)
    done: list[float] = []
    for call, number, spent in zip(graph.calls, numbers, work):
        arrivals = [done[producers[id(t)]] for t in call.inputs if id(t) in producers]
        free[number] = max([free[number], *arrivals]) + spent
        done.append(free[number])
    return max(done, default=0.0) / max(sum(work), 1e-12)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that is made on one device and used on another.

    Attributes:
        maker: the place of the call that makes it; `None` for an input of the model.
        takers: the places of the calls on the other device that use it.
        target: the number of that device; the source is the maker's, and 0 for inputs.
        row_bytes: the bytes of one row of it.
        has_gradient: whether its gradient comes back.
    """

    maker: int | None
    takers: tuple[int, ...]
    target: int
    row_bytes: int
    has_gradient: bool

    def bytes(self, rows: int) -> int:
        """What crosses in a training step with so many rows, there and back."""
        return rows * self.row_bytes * (2 if self.has_gradient else 1)


def find_crossings(graph: Graph, numbers: Sequence[int]) -> list[Crossing]:
    """What a placement has to send from device to device: each tensor once to each of them.

    Args:
        graph: the graph.
        numbers: the device of every call.
    """
    producers = graph.producers()
    takers: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    tensors: dict[int, keras.KerasTensor] = {}
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            if numbers[place] != (0 if maker is None else numbers[maker]):
                tensors[id(tensor)] = tensor
                takers[id(tensor), numbers[place]].append(place)
    return [
        Crossing(
            maker=producers.get(key),
            takers=tuple(dict.fromkeys(places)),
            target=target,
            row_bytes=costs.row_bytes(tensors[key]),
            has_gradient=key in producers and keras.backend.is_float_dtype(tensors[key].dtype),
        )
        for (key, target), places in takers.items()
    ]


def _matches(key: str, path: Sequence[str]) -> bool:
    names = {*path, *("/".join(path[:end]) for end in range(1, len(path) + 1))}
    return key in names or any(re.fullmatch(key, name) for name in names)


def _with_operations(graph: Graph, numbers: dict[int, int]) -> list[int]:
    """Places the calls that are not placed yet beside those that make or take their tensors."""
    producers = graph.producers()
    consumers = {id(t): n for n, call in reversed([*enumerate(graph.calls)]) for t in call.inputs}
    for place, call in enumerate(graph.calls):
        if place not in numbers:
            near = [producers[id(t)] for t in call.inputs if id(t) in producers]
            near += [consumers[id(t)] for t in call.outputs if id(t) in consumers]
            numbers[place] = next((numbers[n] for n in near if n in numbers), 0)
    return [numbers[place] for place in range(len(graph.calls))]


def _chains(graph: Graph) -> list[list[int]]:
    """The graph's calls in chains: in one, each takes what the one before made, and none else."""
    producers = graph.producers()
    before = [{producers[id(t)] for t in c.inputs if id(t) in producers} for c in graph.calls]
    after: dict[int, set[int]] = collections.defaultdict(set)
    for place, makers in enumerate(before):
        for maker in makers:
            after[maker].add(place)
    uses = collections.Counter(id(call.layer) for call in graph.calls)
    chains: dict[int, list[int]] = {}
    for place, (call, makers) in enumerate(zip(graph.calls, before)):
        chain: list[int] = []
        for maker in makers if len(makers) == 1 else ():
            calls_once = uses[id(call.layer)] == uses[id(graph.calls[maker].layer)] == 1
            chain = chains[maker] if calls_once and len(after[maker]) == 1 else chain
        chain.append(place)
        chains[place] = chain
    return list({id(chain): chain for chain in chains.values()}.values())


def _schedule(graph: Graph, count: int, hardware: costs.Hardware) -> tuple[list[int], float]:
    """A device for every call, and the time until the last is done: HEFT on the chains."""
    chains = _chains(graph)
    of_call = {place: number for number, chain in enumerate(chains) for place in chain}
    producers = graph.producers()
    work = [sum(costs.seconds(graph.calls[p], _ROWS, hardware) for p in c) for c in chains]
    # The links between chains, with the time they take across devices.
    links: list[dict[int, float]] = [{} for _ in chains]
    for place, call in enumerate(graph.calls):
        for tensor in {id(t): t for t in call.inputs if id(t) in producers}.values():
            maker, taker = of_call[producers[id(tensor)]], of_call[place]
            if maker != taker:
                spent = costs.crossing(tensor, _ROWS, hardware)
                links[taker][maker] = links[taker].get(maker, 0.0) + spent
    rank = list(work)  # of a chain: the time from its start to the end of everything
    for taker in reversed(range(len(chains))):
        for maker, spent in links[taker].items():
            rank[maker] = max(rank[maker], work[maker] + spent + rank[taker])
    free, done = [0.0] * count, [0.0] * len(chains)
    device, of_layer = [0] * len(chains), dict[int, int]()
    for chain in sorted(range(len(chains)), key=lambda number: (-rank[number], number)):
        layer = id(graph.calls[chains[chain][0]].layer)
        ends = []
        for number in [of_layer[layer]] if layer in of_layer else [*range(count)]:
            arrivals = [
                done[maker] + (spent if device[maker] != number else 0.0)
                for maker, spent in links[chain].items()
            ]
            ends.append((max([free[number], *arrivals]) + work[chain], number))
        done[chain], device[chain] = min(ends)
        free[device[chain]] = done[chain]
        of_layer[layer] = device[chain]
    # The loss is computed on the first device.
    last = device[of_call[producers.get(id(graph.outputs[-1]), 0)]]
    swapped = {last: 0, 0: last}
    numbers = [swapped.get(number, number) for number in device]
    return [numbers[of_call[place]] for place in range(len(graph.calls))], max(done)


def _cut(graph: Graph, count: int, hardware: costs.Hardware) -> list[int]:
    """Stages: consecutive calls, of about the same size, cut where the least crosses."""
    sizes = _sizes(graph.calls, hardware)
    parts = min(count, len(sizes))
    crossing = _crossing_bytes(graph)
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    limit = _smallest_largest(before, parts) * _SLACK
    # least[k][i]: the fewest bytes across the cuts of the first i calls into k stages.
    least = np.full((parts + 1, len(sizes) + 1), math.inf)
    best = np.zeros((parts + 1, len(sizes) + 1), int)
    least[0, 0] = 0.0
    for stage in range(1, parts + 1):
        for end in range(stage, len(sizes) + 1):
            fits = before[end] - before[:end] <= limit
            spent = np.where(fits, least[stage - 1, :end] + crossing[:end], math.inf)
            best[stage, end] = int(np.argmin(spent))
            least[stage, end] = spent[best[stage, end]]
    numbers, end = [0] * len(sizes), len(sizes)
    for stage in range(parts, 0, -1):
        start = best[stage, end]
        numbers[start:end] = [stage - 1] * (end - start)
        end = start
    return numbers


def _sizes(calls: Sequence[LayerCall], hardware: costs.Hardware) -> list[float]:
    """The shares of the calls in the model's work and weights, half and half."""
    seen: set[int] = set()
    weights = []
    for call in calls:
        weights.append(0 if id(call.layer) in seen else costs.variables_bytes(call.variables))
        seen.add(id(call.layer))
    work = [costs.seconds(call, _ROWS, hardware) for call in calls]
    all_work, all_weights = sum(work), max(sum(weights), 1)
    return [one / all_work + two / all_weights for one, two in zip(work, weights)]


def _crossing_bytes(graph: Graph) -> np.ndarray:
    """For each place in the order of the calls the bytes of a row that a cut before it crosses."""
    last = {id(t): len(graph.calls) for t in graph.outputs}
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            last[id(tensor)] = max(place, last.get(id(tensor), 0))
    crossing = np.zeros(len(graph.calls) + 1)
    for place, call in enumerate(graph.calls):
        for tensor in call.outputs:
            crossing[place + 1 : last.get(id(tensor), place) + 1] += costs.row_bytes(tensor)
    return crossing


def _smallest_largest(before: np.ndarray, parts: int) -> float:
    """The least size that the largest of so many consecutive parts can have."""
    count = len(before) - 1
    largest = before.copy()  # of the first i calls in one part
    for _ in range(1, parts):
        following = largest.copy()
        for end in range(1, count + 1):
            ways = np.maximum(largest[:end], before[end] - before[:end])
            following[end] = min(following[end], ways.min())
        largest = following
    return float(largest[count])
