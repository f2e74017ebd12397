"""Keras's own steps through the partitioner."""

import pytest

from keras_multigpu.engines.tensorflow.runners import SliceRunner


@pytest.fixture
def partitioned(monkeypatch):
    """Whole steps are partitioned, not only those given to `parallel.function`."""
    monkeypatch.setattr(SliceRunner, "may_partition_steps", True)
