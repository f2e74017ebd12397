"""The planners of model mode, on graphs whose best placement is known."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu.graphs import costs
from keras_multigpu.graphs.costs import find_crossings, find_share
from keras_multigpu.graphs.graph import read_graph
from keras_multigpu.graphs.placement import choose_placement, cut, schedule

WIDE = 512


@pytest.fixture
def chain():
    """Four equal layers with one narrow place, in the middle."""
    return read_graph(
        keras.Sequential(
            [
                keras.Input((WIDE,)),
                layers.Dense(WIDE),
                layers.Dense(WIDE),
                layers.Dense(4),
                layers.Dense(WIDE),
                layers.Dense(WIDE),
                layers.Dense(WIDE),
            ]
        )
    )


@pytest.fixture
def branches():
    """Two heavy branches that meet at the end."""
    inputs = keras.Input((8,))
    ends = []
    for _ in range(2):
        tensor = inputs
        for _ in range(3):
            tensor = layers.Dense(2048)(tensor)
        ends.append(layers.Dense(1)(tensor))
    return read_graph(keras.Model(inputs, layers.Add()(ends)))


def test_a_chain_is_cut_where_least_crosses(chain):
    numbers = cut(chain, 2)
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1}
    (crossing,) = find_crossings(chain, numbers)
    assert crossing.row_bytes == 4 * 4
    assert crossing.has_gradient
    assert crossing.bytes(10) == 2 * 10 * 4 * 4


def test_a_chain_gains_no_time(chain):
    assert find_share(chain, cut(chain, 2)) == pytest.approx(1)


def test_more_devices_than_calls(chain):
    numbers = cut(chain, 16)
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(chain.calls)


def test_branches_go_to_different_devices(branches):
    numbers, span = schedule(branches, 2)
    heavy = [n for c, n in zip(branches.calls, numbers) if costs.flops(c) > 1e6]
    assert sorted(heavy) == [0] * 2 + [1] * 2
    assert span < 0.6 * sum(map(costs.seconds, branches.calls))
    assert numbers[-1] == 0  # where the loss is
    assert find_share(branches, numbers) < 0.6
    assert choose_placement(branches, 2) == numbers


def test_a_layer_that_is_called_twice_is_on_one_device():
    shared, inputs = layers.Dense(WIDE), keras.Input((WIDE,))
    tensor = shared(layers.Dense(WIDE)(shared(inputs)))
    graph = read_graph(keras.Model(inputs, layers.Dense(WIDE)(tensor)))
    numbers = choose_placement(graph, 3)
    places = {n for call, n in zip(graph.calls, numbers) if call.layer is shared}
    assert len(places) == 1


def test_one_device_takes_all(branches):
    assert set(choose_placement(branches, 1)) == {0}
    assert find_crossings(branches, [0] * len(branches.calls)) == []


def test_what_calls_cost():
    inputs = keras.Input((10, 3), dtype="float32")
    dense, embed = layers.Dense(5), layers.Embedding(100, 7)
    tokens = keras.Input((4,), dtype="int32")
    graph = read_graph(keras.Model([inputs, tokens], [dense(inputs), embed(tokens)]))
    found = {call.layer.name: call for call in graph.calls}
    assert costs.flops(found[dense.name]) == 10 * 5 + 2 * 3 * 5 * 10
    assert costs.flops(found[embed.name]) == 4 * 7  # a lookup is a copy
    assert costs.variables_bytes([*dense.variables, *dense.variables]) == 4 * (3 * 5 + 5)
    assert costs.row_bytes(np.zeros((2, 3), "float16")) == 6


def test_a_model_says_what_it_warns_of_once():
    query = keras.Input((4,), name="query")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = keras.Model({"q": query}, layers.Dense(4)(query))  # Keras wants equal names
    assert len(read_graph(model).calls) == 1
