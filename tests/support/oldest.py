"""Prints constraints for pip: the lowest versions that `pyproject.toml` declares for one backend.

`python tests/support/oldest.py tensorflow-cpu > constraints.txt`
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SHARED = ("demo", "reports", "sparse", "sparse-numba")


def _requirements(name):
    """The lower bounds in one list of requirements, by package."""
    start = re.search(rf"^{re.escape(name)} = \[", TEXT, flags=re.MULTILINE).end()
    found = re.findall(r'"([\w.-]+)>=([\d.]+)[";]', TEXT[start : TEXT.index("]\n", start)])
    return dict(found)


def constraints(backend):
    """The oldest versions of everything that the tests of a backend need."""
    bounds = {}
    for name in ("dependencies", *SHARED, backend):
        bounds.update(_requirements(name))
    # TensorFlow's own bound: a build of grpcio so old exists for no Python that is supported.
    bounds.pop("grpcio", None)
    return bounds


if __name__ == "__main__":
    print("\n".join(f"{name}=={bound}" for name, bound in constraints(sys.argv[1]).items()))
