"""Reports on model mode: what crosses on the way to the loss, in the plot and in predictions."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu import make_parallel, reports
from keras_multigpu.reports.inspection import find_sizes
from keras_multigpu.reports.placement import find_cut


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
    crossing = [text for text in texts if text.endswith(" B")]
    # Ten rows of float32: inputs there, outputs there and back.
    assert sorted(crossing) == sorted([" 240 B"] * len(away) + [f" {80 * n} B" for n in away])
    report = reports.transfers(parallel, (np.ones((10, 6)), [np.ones((10, n)) for n in (3, 5)]))
    sizes = find_sizes(model, model.outputs)
    cut = find_cut(model, 2, 10, sizes, placement)
    assert cut.size == report.bytes("training")["activations"] == 40 * sum(away)
    assert cut.copies == len(away)


def test_a_loss_on_the_device_of_the_outputs_crosses_nothing():
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, name="hidden")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="end")(hidden))
    parallel = make_parallel(model, 2, mode="model", placement={"hidden": 1})
    (axes,) = reports.plot_placement(parallel, rows=10).axes
    crossing = [text.get_text() for text in axes.texts if text.get_text().endswith(" B")]
    assert sorted(crossing) == [" 240 B", " 320 B"]  # the inputs, and what `hidden` makes
