"""What one process can't do on JAX: use the devices of other machines by itself."""

import pytest

from keras_multigpu import cluster, list_devices


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("connect", lambda: cluster.connect(["127.0.0.1:2222"])),
        ("disconnect", cluster.disconnect),
        ("serve", cluster.serve),
    ],
)
def test_needs_tensorflow(name, call):
    with pytest.raises(RuntimeError, match=f"`{name}` needs the Keras backend 'tensorflow'") as e:
        call()
    assert "Received: keras.backend.backend()='jax'" in str(e.value)
    assert "keras_multigpu.cluster.join" in str(e.value)
    assert list_devices() == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
