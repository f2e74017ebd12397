"""Names stay what they are: texts that look like the same number have different codes."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sparse_tables import content

from keras_multigpu.sparse import HashedDataset, HashEncoder

pytestmark = pytest.mark.backend_free

NAMES = ["034", "34", "34.0", "+34", "-34", " 34", "34 ", "1_0", "10", "1e1", "10.0", "0x10"]
NAMES += ["\uff11\uff10", "True", "true", "1", "inf", "1E1", "None", "null", "NA", "N/A"]
NAMES += ["René", "Rene", "Renè"]
ENCODER = HashEncoder({"name": 1000}, collision_probability=1e-6)


def code_of(values):
    return ENCODER.transform({"name": values}).tolist()


CODES = [code_of([name])[0] for name in NAMES]


def test_names_have_codes_of_their_own():
    assert len({tuple(code) for code in CODES}) == len(NAMES)


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda names: np.array(names),
        lambda names: np.array(names, object),
        lambda names: pd.Series(names),
        lambda names: pd.Series(names, dtype=object),
        lambda names: pd.Series(names, dtype="string"),
        lambda names: pd.Series(names, dtype="category"),
        lambda names: pd.Series(names, dtype=pd.ArrowDtype(pa.large_string())),
        lambda names: pl.Series(names),
        lambda names: pl.Series(names, dtype=pl.Categorical),
        lambda names: pl.Series(names, dtype=pl.Enum(names)),
        lambda names: pa.array(names).dictionary_encode(),
        lambda names: pa.array([name.encode() for name in names]),
    ],
)
def test_every_kind_of_column_has_the_codes_of_its_texts(make):
    assert code_of(make(NAMES)) == CODES


@pytest.mark.parametrize("form", ["csv", "quoted", "csv.gz", "plain", "dictionary", "pandas", "pl"])
def test_every_file_has_the_codes_of_its_texts(tmp_path, form):
    path = str(
        tmp_path / ("names.parquet" if "." not in form and form != "csv" else f"names.{form}")
    )
    frame = pd.DataFrame({"name": NAMES, "label": np.arange(len(NAMES))})
    if form in ("csv", "csv.gz"):
        frame.to_csv(path, index=False)
    elif form == "quoted":
        path = str(tmp_path / "names.csv")
        frame.to_csv(path, index=False, quoting=2)
    elif form == "pl":
        pl.from_pandas(frame).write_parquet(path)
    elif form == "pandas":
        frame.astype({"name": "category"}).to_parquet(path)
    else:
        pq.write_table(pa.Table.from_pandas(frame), path, use_dictionary=form == "dictionary")
    data = HashedDataset(path, ENCODER, label="label", batch_size=7, shuffle=False)
    labels, indices = content(data)
    assert labels == list(range(len(NAMES)))
    assert indices.tolist() == CODES


def test_names_in_another_encoding_are_different(tmp_path):
    """Bytes that are not UTF-8 are hashed as they are."""
    path = tmp_path / "latin.csv"
    path.write_bytes("name,label\nRené,0\nRenè,1\nRen?,2\n".encode("latin-1"))
    _, indices = content(HashedDataset(str(path), ENCODER, label="label", shuffle=False))
    assert len(np.unique(indices, axis=0)) == 3
    expected = [name.encode("latin-1") for name in ("René", "Renè", "Ren?")]
    assert indices.tolist() == code_of(pa.array(expected))


def test_numbers_have_the_texts_of_numbers():
    assert code_of([34, 10]) == code_of(["34", "10"])
    assert code_of([34.0, 10.0]) == code_of(["34.0", "10.0"])


def test_integers_that_pandas_made_floats_are_told():
    """A file has `7`; pandas reads 7.0 if another row has no value."""
    column = pd.Series([7, None, 12])
    with pytest.warns(UserWarning, match=r"'name' has the text '7.0', not '7'.*`Int64`"):
        assert code_of(column)[0] == code_of(["7.0"])[0]
    assert code_of(column.astype("Int64")) == code_of(["7", "nan", "12"])
    code_of(pd.Series([7.5, None]))
    code_of(pd.Series([7.0, 12.0]))
    code_of(pd.Series([None, None], dtype="float64"))


@pytest.mark.parametrize("value", ["1_0", "\uff11\uff10", "0x10", "1,0", "ten"])
def test_a_label_that_is_no_number_is_refused(tmp_path, value):
    path = tmp_path / "labels.csv"
    path.write_text(f'name,label\na,"{value}"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="'label' must be a finite number"):
        HashedDataset(str(path), ENCODER, label="label")
