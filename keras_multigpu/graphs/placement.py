"""Places the calls of a graph on devices: as the user says, or by estimated costs."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_multigpu.arguments import as_integer, did_you_mean, number_of
from keras_multigpu.graphs import costs
from keras_multigpu.graphs.graph import Graph, LayerCall

# Branches go to several devices only if that saves a tenth of the estimated time.
_LEAST_GAIN = 0.9
# For a cheaper cut, the largest stage may exceed its smallest possible size by this factor.
_SLACK = 1.1


def check_placement(placement: object, count: int) -> None:
    """Raises a `ValueError` unless it is `None` or a dict from names to device numbers."""
    expected = (
        "`placement` must be None, 'spread', or a dict from names of layers, or regular "
        f"expressions, to device numbers from 0 to {count - 1}."
    )
    if placement is None:
        return
    if not isinstance(placement, Mapping) or not placement:
        empty = ", which names no layer" if isinstance(placement, Mapping) else ""
        hint = did_you_mean(placement.lower() if isinstance(placement, str) else None, ["spread"])
        hint = hint or " Write `placement={'dense': 1}`, for example."
        raise ValueError(f"{expected} Received: placement={placement!r}{empty}.{hint}")
    for name, number in placement.items():
        device = as_integer(number)
        if not isinstance(name, str):
            cure = f"Name it: {name.name!r}." if isinstance(name, keras.Layer) else "Name a layer."
            raise ValueError(f"{expected} Received: {name!r}: {number!r}. {cure}")
        if device is None or not 0 <= device < count:
            cure = "Use a number in that range, or make the model parallel on more devices."
            if isinstance(number, str):
                cure = "Use the device's number: its place in `devices`."
            raise ValueError(
                f"{expected} Received: {name!r}: {number!r}, with {number_of(count, 'device')}. "
                f"{cure}"
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"{expected} Received: {name!r}, which is no regular expression: {error}. "
                "Escape what is to be taken literally: `re.escape(name)`."
            ) from error


def place_by_names(graph: Graph, placement: Mapping[str, int]) -> list[int]:
    """The device of every call, by layer names or by regular expressions for whole names.

    A name is a layer's, or the name of a model around it, or both joined by a slash. Layers that
    nothing matches go to device 0; operations go beside the calls that make or use their tensors.

    Raises:
        ValueError: if an entry matches no layer, or a layer is matched twice.
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


def _matches(key: str, path: Sequence[str]) -> bool:
    names = {*path, *("/".join(path[:end]) for end in range(1, len(path) + 1))}
    return key in names or any(re.fullmatch(key, name) for name in names)


def _with_operations(graph: Graph, numbers: dict[int, int]) -> list[int]:
    """Places the remaining calls beside those that make or take their tensors."""
    producers = graph.producers()
    consumers = {id(t): n for n, call in reversed([*enumerate(graph.calls)]) for t in call.inputs}
    for place, call in enumerate(graph.calls):
        if place not in numbers:
            near = [producers[id(t)] for t in call.inputs if id(t) in producers]
            near += [consumers[id(t)] for t in call.outputs if id(t) in consumers]
            numbers[place] = next((numbers[n] for n in near if n in numbers), 0)
    return [numbers[place] for place in range(len(graph.calls))]


def choose_placement(graph: Graph, count: int) -> list[int]:
    """Chooses the device of every call.

    Branches go to different devices if the estimate saves time: list scheduling of the graph's
    chains by the remaining path (HEFT: Topcuoglu, Hariri and Wu, 2002). Otherwise the calls are
    cut into consecutive stages of similar work and weights, where the fewest bytes cross: chain
    partitioning by dynamic programming (as in Pinar and Aykanat, 2004). All calls of a layer go to
    one device.
    """
    if count == 1 or not graph.calls:
        return [0] * len(graph.calls)
    scheduled, span = schedule(graph, count)
    alone = sum(costs.seconds(call) for call in graph.calls)
    numbers = scheduled if span <= _LEAST_GAIN * alone else cut(graph, count)
    first: dict[int, int] = {}
    return [first.setdefault(id(c.layer), n) for c, n in zip(graph.calls, numbers)]


def schedule(graph: Graph, count: int) -> tuple[list[int], float]:
    """HEFT on the chains: a device for every call, and the time until the last call ends."""
    chains = _chains(graph)
    of_call = {place: number for number, chain in enumerate(chains) for place in chain}
    producers = graph.producers()
    work = [sum(costs.seconds(graph.calls[p]) for p in c) for c in chains]
    # The links between chains, with the time to send each between devices.
    links: list[dict[int, float]] = [{} for _ in chains]
    for place, call in enumerate(graph.calls):
        for tensor in {id(t): t for t in call.inputs if id(t) in producers}.values():
            maker, taker = of_call[producers[id(tensor)]], of_call[place]
            if maker != taker:
                spent = costs.crossing_seconds(tensor)
                links[taker][maker] = links[taker].get(maker, 0.0) + spent
    rank = list(work)  # the time from a chain's start to the end of all work
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
    # The loss is computed on the first device, so the last call goes there.
    last = device[of_call[producers.get(id(graph.outputs[-1]), 0)]]
    swapped = {last: 0, 0: last}
    numbers = [swapped.get(number, number) for number in device]
    return [numbers[of_call[place]] for place in range(len(graph.calls))], max(done)


def _chains(graph: Graph) -> list[list[int]]:
    """Groups calls into chains: each call is the only user of the call before, its only source."""
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


def cut(graph: Graph, count: int) -> list[int]:
    """Cuts the calls into consecutive stages of similar size, where the fewest bytes cross."""
    sizes = _sizes(graph.calls)
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


def _sizes(calls: Sequence[LayerCall]) -> list[float]:
    """The size of each call: its shares of the model's work and weights, added."""
    seen: set[int] = set()
    weights = []
    for call in calls:
        weights.append(0 if id(call.layer) in seen else costs.variables_bytes(call.variables))
        seen.add(id(call.layer))
    work = [costs.seconds(call) for call in calls]
    all_work, all_weights = sum(work), max(sum(weights), 1)
    return [one / all_work + two / all_weights for one, two in zip(work, weights)]


def _crossing_bytes(graph: Graph) -> np.ndarray:
    """For each call, the bytes per row that cross a cut before it."""
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
    """The smallest possible size of the largest of `parts` consecutive parts."""
    largest, ends = before, range(1, len(before))  # of the first i calls in one part
    for _ in range(1, parts):
        ways = (np.maximum(largest[:end], before[end] - before[:end]) for end in ends)
        largest = np.minimum(largest, [0.0, *(one.min() for one in ways)])
    return float(largest[-1])
