"""Both ways in which data mode runs on TensorFlow."""

import pytest

from keras_multigpu.engines.tensorflow import runners


@pytest.fixture
def sliced(monkeypatch):
    """Slices calls where steps are partitioned, as with `shard` and over joined processes."""
    monkeypatch.setattr(runners, "Partition", lambda *settings: None)


@pytest.fixture(params=["partitioned", pytest.param("sliced", marks=pytest.mark.slow)])
def way(request):
    """`"partitioned"`, or `"sliced"` as with `shard`."""
    if request.param == "sliced":
        request.getfixturevalue("sliced")
    return request.param
