"""Losses that a parallel model adds in place of its replicas'."""

import keras

from keras_multigpu.modes.losses import add_losses


def test_a_loss_with_the_id_of_one_that_is_gone_is_counted_once():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.ops.convert_to_tensor(1.0)
    # What a replica's loss leaves in a layer; the memory of one that is freed is used again.
    model.layers[0]._loss_ids.add(id(loss))
    with keras.StatelessScope(collect_losses=True):
        add_losses(model, [loss])
        assert [float(one) for one in model.losses] == [1.0]
