"""The former place of the modes, which model files of earlier versions name."""

import sys

from keras_multigpu.modes import data, model, tower

for _name, _module in {"data": data, "tower": tower, "model": model, "branch": model}.items():
    sys.modules[f"{__name__}.{_name}"] = _module
