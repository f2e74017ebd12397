"""The script that shows a case: it runs without the fuzzer."""

from __future__ import annotations

import re

from .case import Case
from .program import definitions

_PRELUDE = """\
import numpy as np, keras, keras_multigpu as kmg
from keras import layers, ops
"""

# Each trial starts from the plain model's state after its first training.
_AGAIN = """\
    variables = [*m.weights, *m.optimizer.variables]
    begin = begin if parallel else [np.asarray(v) for v in variables]
    trained = {id(v) for v in m.trainable_variables}
    first = {name: globals()[name] for name in 'XYW'}
    for number, data in enumerate(TRIALS):
        rng = np.random.default_rng(number)
        for v, value in zip(variables, begin):
            v.assign(value * rng.uniform(0.5, 1.5, size=value.shape) if id(v) in trained else value)
        m.reset_metrics()
        globals().update(data())
        out |= {f'{number} {name}': value for name, value in again(m).items()}
        out[f'{number} weights'] = [np.asarray(w) for w in m.weights]
    globals().update(first)
"""


def script(case: Case, remark: str) -> str:
    """A script that shows the case: it prints both results and their differences."""
    lines = ["# " + line for line in remark.splitlines()]
    options = "".join(f", {name}={value}" for name, value in case.options)
    tensorflow = "import tensorflow as tf\n" if re.search(r"\btf\.", definitions(case)) else ""
    devices = f"kmg.use_virtual_devices(4); keras.config.set_floatx({case.floatx!r})\n"
    return (
        "\n".join(lines) + "\n" + _PRELUDE + tensorflow + devices + "\n" + definitions(case) + "\n"
        "results = []\n"
        "for parallel in (False, True):\n"
        "    keras.backend.clear_session(); keras.utils.set_random_seed(3)\n"
        "    m = build()\n"
        f"    m = kmg.make_parallel(m, {case.n}, mode={case.mode!r}{options}) if parallel else m\n"
        "    keras.utils.set_random_seed(4)\n"
        "    out = use(m)\n"
        "    out |= {'weights': [np.asarray(w) for w in m.weights],\n"
        "        'optimizer': [np.asarray(v) for v in m.optimizer.variables]}\n"
        "    results.append(out)\n" + (_AGAIN if case.trials else "") + "for name in results[0]:\n"
        "    pairs = zip(*(keras.tree.flatten(one[name]) for one in results))\n"
        "    gap = max((np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0)\n"
        "        for a, b in pairs), default=0)\n"
        "    print(f'{name:12} largest difference {gap:.3g}')\n"
    )
