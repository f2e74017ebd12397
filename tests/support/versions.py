"""What versions of Keras before the newest can't do."""

import keras
import pytest

KERAS = tuple(map(int, keras.version().split(".")[:2]))

needs_loose_inputs = pytest.mark.skipif(KERAS < (3, 14), reason="Keras refuses such inputs")
"""For models whose outputs don't depend on all inputs, or are inputs."""

NONE = {"c": None} if KERAS >= (3, 13) else {}
"""What a structure of tensors may also have."""
