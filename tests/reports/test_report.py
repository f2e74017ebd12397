"""The common form of reports: text, Markdown, HTML, DataFrame, JSON, plot, files."""

import json
import re
import sys
import types

import numpy as np
import pytest

from keras_multigpu.reports import Column, Report

pytestmark = pytest.mark.backend_free


class Times(Report):
    def draw(self, figure):
        figure.subplots().plot([row[1] for row in self.rows], [row[2] for row in self.rows])


COLUMNS = [
    Column("name"),
    Column("devices"),
    Column("time", "s", ".1f"),
    Column("size", "", lambda value: f"{value / 1e6:.0f} MB"),
]


def report(**changes):
    given = {
        "title": "Two <runs>",
        "columns": COLUMNS,
        "rows": [("a|b", 1, 8.25, 3_000_000), ("<c>", 16, float("nan"), None)],
        "notes": ["Measured & noted."],
        "settings": {"batch": 32, "date": "2020-02-02"},
    }
    return Times(**(given | changes))


def test_text():
    assert str(report()).splitlines() == [
        "Two <runs>",
        "batch: 32",
        "date: 2020-02-02",
        "",
        "name  devices  time (s)  size",
        "a|b         1       8.2  3 MB",
        "<c>        16       nan     -",
        "",
        "Measured & noted.",
    ]
    assert repr(report()) == str(report())


def test_text_without_rows_settings_and_notes():
    assert str(report(rows=[], notes=[], settings=None)).splitlines() == [
        "Two <runs>",
        "",
        "name  devices  time (s)  size",
    ]


def test_markdown():
    assert report().to_markdown().splitlines() == [
        "**Two <runs>**",
        "",
        "- batch: 32",
        "- date: 2020-02-02",
        "",
        "| name | devices | time (s) | size |",
        "| --- | ---: | ---: | ---: |",
        "| a\\|b | 1 | 8.2 | 3 MB |",
        "| <c> | 16 | nan | - |",
        "",
        "Measured & noted.",
    ]


def test_line_breaks_end_no_row():
    """Nor a heading, an item of the settings or a note."""
    columns = [Column("name\nand more"), *COLUMNS[1:]]
    rows = [("a\nb\r\nc", 1, 8.25, None), ("d\\|e", 1, 8.25, None)]
    broken = report(
        title="Two\nruns", columns=columns, rows=rows, notes=["One\n\ntwo."], settings={"a": "b\nc"}
    )
    assert broken.to_markdown().splitlines() == [
        "**Two runs**",
        "",
        "- a: b c",
        "",
        "| name and more | devices | time (s) | size |",
        "| --- | ---: | ---: | ---: |",
        "| a b c | 1 | 8.2 | - |",
        "| d\\\\\\|e | 1 | 8.2 | - |",
        "",
        "One  two.",
    ]
    lines = str(broken).splitlines()
    assert lines[3] == "name and more  devices  time (s)  size"
    assert lines[4].split() == ["a", "b", "c", "1", "8.2", "-"]


def test_html_is_escaped_and_needs_nothing_else():
    text = report()._repr_html_()
    assert "<strong>Two &lt;runs&gt;</strong>" in text
    assert "<td>&lt;c&gt;</td>" in text
    assert "<th>devices</th>" in text
    assert "<p>Measured &amp; noted.</p>" in text
    assert "<li>batch: 32</li>" in text
    for part in ("http", "<script", "<link", "src="):
        assert part not in text
    for tag in ("div", "table", "tbody", "ul", "details"):
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>") > 0


def test_code_in_html():
    """Between backticks in the notes, escaped too."""
    text = report(notes=["See `a < b`, not `c`; 5` stays."])._repr_html_()
    assert "<p>See <code>a &lt; b</code>, not <code>c</code>; 5` stays.</p>" in text


def test_html_begins_with_what_was_found_and_a_picture(monkeypatch):
    numbers = {"rows": [("a", 1, 8.25, None), ("b", 16, 4.0, None)]}
    text = report(**numbers).to_html()
    places = [text.index(part) for part in ("Measured &amp;", "<img", "<table", "<details>")]
    assert places == sorted(places)
    assert 'alt="Two &lt;runs&gt;" src="data:image/png;base64,iVBOR' in text
    assert "http" not in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert report(**numbers)._repr_html_() is None  # a notebook shows the text without pandas


def test_dataframe():
    frame = report().to_dataframe()
    assert list(frame.columns) == ["name", "devices", "time", "size"]
    assert frame["devices"].tolist() == [1, 16]
    assert frame.attrs["units"] == {"name": "", "devices": "", "time": "s", "size": ""}
    assert frame.attrs["settings"] == {"batch": 32, "date": "2020-02-02"}
    assert frame.attrs["title"] == "Two <runs>"
    assert frame.attrs["notes"] == ["Measured & noted."]


def test_json():
    rows = [("a", np.int64(1), np.float32(0.5), 2), ("b", 2, float("inf"), None)]
    settings = {
        "parts": (1, True),
        "placement": types.MappingProxyType({"a": np.int8(1)}),
        "by": int,
    }
    found = json.loads(report(rows=rows, settings=settings).to_json())
    assert found == {
        "title": "Two <runs>",
        "settings": {"parts": [1, True], "placement": {"a": 1}, "by": "<class 'int'>"},
        "columns": [
            {"name": "name", "unit": ""},
            {"name": "devices", "unit": ""},
            {"name": "time", "unit": "s"},
            {"name": "size", "unit": ""},
        ],
        "rows": [
            {"name": "a", "devices": 1, "time": 0.5, "size": 2},
            {"name": "b", "devices": 2, "time": None, "size": None},
        ],
        "notes": ["Measured & noted."],
    }


@pytest.mark.parametrize("suffix", ["txt", "md", "html", "json", "JSON"])
def test_save(tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    plain = report(rows=[("a", 1, 8.25, None)])
    plain.save(path)
    forms = {"txt": str, "md": Report.to_markdown, "html": Report.to_html, "json": Report.to_json}
    assert path.read_text(encoding="utf-8") == forms[suffix.lower()](plain) + "\n"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_save_the_plot(tmp_path, suffix, start):
    path = tmp_path / f"report.{suffix}"
    report().save(str(path))
    assert path.read_bytes().startswith(start)


def test_plot_leaves_pyplot_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it would fail
    figure = report().plot()
    assert len(figure.axes) == 1
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_save_under_another_name(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"`path` must end in one of .txt, .md, .html, .json, .png, .svg, .pdf. "
        r"Received: path=.*report.xls'\)?. Choose the ending",
    ):
        report().save(tmp_path / "report.xls")
    with pytest.raises(ValueError, match="Received: path=None. Choose"):
        report().save(None)


def test_a_row_of_another_length():
    with pytest.raises(
        ValueError,
        match=r"each of the columns \['name', 'devices', 'time', 'size'\]. Received: "
        r"row=\(1, 2\). Give `None`",
    ):
        report(rows=[(1, 2)])


@pytest.mark.parametrize(
    ("module", "method", "needs"),
    [
        ("pandas", "to_dataframe", "pandas"),
        ("pandas", "to_html", "pandas"),
        ("matplotlib.figure", "plot", "matplotlib"),
    ],
)
def test_without_the_extra(monkeypatch, module, method, needs):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError,
        match=rf"needs {needs}, which is not installed. Install the extra `reports`: `pip install "
        r"'\.\[reports\]'` in a clone",
    ):
        getattr(report(), method)()
    assert str(report()).startswith("Two <runs>")
