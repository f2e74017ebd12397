"""Plots of model mode, and what crosses on the way to the loss, in plots and in predictions."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch, Rectangle

from keras_multigpu import make_parallel, reports
from keras_multigpu.graphs.costs import find_crossings, with_loss
from keras_multigpu.reports.placement import find_blocks
from keras_multigpu.reports.workload import find_cut, find_sizes


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("placement", "away"), [({"end5": 1}, [5]), ({"end3": 1}, [3]), ({"end.": 1}, [3, 5])]
)
def test_the_way_to_the_loss(placement, away):
    """It is computed on the first device: what others make crosses to it, and back."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(size, name=f"end{size}")(inputs) for size in (3, 5)])
    parallel = make_parallel(model, 2, mode="model", placement=placement)
    parallel.compile("sgd", "mse")
    (axes,) = reports.plot_placement(parallel, rows=10).axes
    texts = [text.get_text() for text in axes.texts]
    assert "loss" in texts
    crossing = [text for text in texts if text.startswith("sends")]
    # Ten rows of float32: inputs there, once; outputs there and back.
    assert sorted(crossing) == sorted(["sends 240 B", *(f"sends {80 * n} B" for n in away)])
    report = reports.transfers(parallel, (np.ones((10, 6)), [np.ones((10, n)) for n in (3, 5)]))
    sizes = find_sizes(model, model.outputs)
    cut = find_cut(model, 2, 10, sizes, placement)
    assert cut.size == report.bytes("training")["activations"] == 40 * sum(away)
    assert cut.copies == len(away)


def test_the_default_placement_sends_the_least():
    """Wide outputs cross to the loss, whoever places the layers."""
    sizes = (64, 64, 2, 64, 128)
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(size) for size in sizes)])
    parallel = make_parallel(model, 2, mode="model")
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, (np.ones((10, 64)), np.ones((10, 128))))
    sent = report.bytes("training")
    assert report.least == sent["activations"] + sent["gradients"] == 2 * 10 * 4 * (2 + 128)
    assert not any("times as much as the placement" in note for note in report.notes)


def test_a_loss_on_the_device_of_the_outputs_crosses_nothing():
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, name="hidden")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="end")(hidden))
    parallel = make_parallel(model, 2, mode="model", placement={"hidden": 1})
    (axes,) = reports.plot_placement(parallel, rows=10).axes
    crossing = [text.get_text() for text in axes.texts if text.get_text().startswith("sends")]
    assert sorted(crossing) == ["sends 240 B", "sends 320 B"]  # the inputs, and what `hidden` makes


def _deep():
    """Fifteen named blocks of 15 layers around a residual, as EfficientNet has them."""
    x = inputs = keras.Input((4,))
    for number in range(15):
        name, start = f"block{number}a", x
        for layer in range(9):
            x = layers.Activation("tanh", name=f"{name}_part_{layer}")(x)
        gate = x
        for layer in range(4):
            gate = layers.Dense(4, name=f"{name}_gate_{layer}")(gate)
        x = layers.Multiply(name=f"{name}_excite")([x, gate])
        x = layers.Add(name=f"{name}_add")([start, x])
    return keras.Model(inputs, layers.Dense(2, name="end")(x))


def _wide():
    """More branches side by side than columns fit, whose ends meet in one layer."""
    inputs = [keras.Input((1,)) for _ in range(16)]
    ends = [layers.Dense(4, name=f"field_{place}")(one) for place, one in enumerate(inputs)]
    return keras.Model(inputs, layers.Concatenate()(ends))


def _skips():
    """Each layer takes the outputs of the three before it."""
    made = [keras.Input((4,)) for _ in range(3)]
    for place in range(28):
        made.append(layers.Add(name=f"l{place}")(made[-3:]))
    return keras.Model(made[:3], made[-2:])


def _efficient_net():
    return keras.applications.EfficientNetB0(weights=None, input_shape=(32, 32, 3))


def _plot(model, devices, placement=None):
    parallel = make_parallel(model, devices, mode="model", placement=placement)
    figure = reports.plot_placement(parallel, rows=10)
    return figure, figure.axes[0]


@pytest.mark.parametrize(
    ("build", "devices", "placement"),
    [
        (_deep, 4, None),
        (_deep, 2, {".*_(part|gate)_[02468]": 1}),  # devices change 135 times: blocks of both
        (_wide, 4, None),
        (_skips, 2, {"l.*[13579]": 1}),
        (_skips, 1, None),
        pytest.param(_efficient_net, 4, None, marks=pytest.mark.slow),
    ],
)
def test_plots_fit_a_screen_and_lines_avoid_boxes(build, devices, placement):
    figure, axes = _plot(build(), devices, placement)
    width, height = figure.get_size_inches()
    assert width <= 13
    assert height <= 16.5
    renderer = FigureCanvasAgg(figure).get_renderer()
    bars = [one for one in axes.patches if isinstance(one, Rectangle)]
    boxes = [bar.get_bbox() for bar in bars]
    for place, box in enumerate(boxes):
        assert not any(_overlap(box, other) > 1e-9 for other in boxes[:place])
    arrows = [one.get_path() for one in axes.patches if isinstance(one, FancyArrowPatch)]
    points = np.concatenate([one for path in arrows for one in path.to_polygons(closed_only=False)])
    assert len(points) > len(boxes)
    for box in boxes:
        inside = (points > box.min + 0.01) & (points < box.max - 0.01)
        assert not inside.all(axis=1).any()
    extents = [text.get_window_extent(renderer) for text in [*axes.texts, axes.get_legend()]]
    for place, extent in enumerate(extents):
        assert 0 <= extent.x0 < extent.x1 <= figure.dpi * width
        assert not any(extent.overlaps(other) for other in extents[:place])


def test_each_device_has_a_column():
    _, axes = _plot(_wide(), 4)
    bars = [one for one in axes.patches if isinstance(one, Rectangle)]
    places = {(bar.get_facecolor(), round(bar.get_x(), 6)) for bar in bars}
    assert len(places) == len({color for color, _ in places}) == len({x for _, x in places}) == 4


def _overlap(first, second):
    """How far two boxes reach into each other, in the direction in which they do so less."""
    return min(np.minimum(first.max, second.max) - np.maximum(first.min, second.min))


@pytest.mark.parametrize("build", [_deep, _wide])
def test_each_call_is_in_one_block_on_one_device(build):
    parallel = make_parallel(build(), 4, mode="model")
    graph, numbers = with_loss(parallel.stages.graph, parallel.stages.numbers)
    blocks = find_blocks(graph, numbers, 23)
    assert [place for block in blocks for place in block] == list(range(len(graph.calls)))
    assert len(blocks) <= 23
    assert all(len({numbers[place] for place in block}) == 1 for block in blocks)
    assert len(blocks[-1]) == 1


def test_blocks_follow_names():
    sizes = [9, 11] * 7
    names = [f"stage{n}_{layer}_part" for n, size in enumerate(sizes) for layer in range(size)]
    chain = [layers.Activation("tanh", name=name) for name in names]
    _, axes = _plot(keras.Sequential([keras.Input((4,)), *chain], name="chain"), 1)
    texts = [text.get_text() for text in axes.texts]
    blocks = [(f"stage{n}", f"{size} layers, no weights") for n, size in enumerate(sizes)]
    assert texts == ["chain on 1 device", "inputs", *itertools.chain(*blocks), "loss"]


def test_blocks_follow_residuals_without_names():
    """Cuts are where one tensor passes."""
    x = inputs = keras.Input((4,))
    for _ in range(12):
        y = x
        for _ in range(5):
            y = layers.Dense(4)(y)
        x = layers.Add()([x, y])
    parallel = make_parallel(keras.Model(inputs, x), 1, mode="model")
    graph, numbers = with_loss(parallel.stages.graph, parallel.stages.numbers)
    blocks = find_blocks(graph, numbers, 23)
    assert blocks[:-1] == [range(start, start + 6) for start in range(0, 72, 6)]


def test_what_crosses_inside_a_block_counts():
    """Devices change too often for blocks of one device each."""
    parallel = make_parallel(_deep(), 2, mode="model", placement={".*_(part|gate)_[02468]": 1})
    stages = parallel.stages
    figure = reports.plot_placement(parallel)
    crossing = find_crossings(*with_loss(stages.graph, stages.numbers))
    total = sum(one.bytes(1) for one in crossing)
    red = [text.get_text() for text in figure.axes[0].texts if text.get_color() == "red"]
    assert all(text.endswith(" B") for text in red)
    assert sum(int(text.split()[1]) for text in red) == total
