"""What `make docs` makes of pages and notebooks, so that it fits on the screen."""

import re

import pytest
from support.pages import PAGES, ROOT
from support.scripts import load

COLUMNS = 100  # have room, on a screen of 1400 pixels


@pytest.mark.backend_free
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_is_not_cut_off(path):
    fences = re.findall(r"^```\w*\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for fence in fences for line in fence.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.fixture(scope="module")
def hooks():
    """Its libraries come with `make docs`, which `make test-all` runs before."""
    pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    return load(ROOT / "docs" / "hooks.py")


PANDAS = """<div>
<style scoped>
    .dataframe tbody tr th { vertical-align: top; }
</style>
<table border="1" class="dataframe">
  <thead>
    <tr style="text-align: right;">
      <th></th>
      <th>a &lt; <code>"b"</code></th>
    </tr>
  </thead>
  <tbody>
    <tr>
      <th>0</th>
      <td>5</td>
    </tr>
  </tbody>
</table>
</div>"""


def test_tables_of_notebooks_are_tables_of_the_site(hooks):
    table = hooks._output({"text/html": PANDAS.splitlines(keepends=True), "text/plain": "a 5"})
    assert "<table>" in table
    assert "style" not in table
    shown = hooks.on_page_content(table)
    assert '<td data-column="a &lt; &quot;b&quot;"><div>5</div></td>' in shown
    assert '<th data-column=""><div>0</div></th>' in shown
    assert shown.count("<th>") == 2  # the header's stay


def test_what_notebooks_print_is_wrapped(hooks):
    assert hooks._output({"text/plain": ["long ", "line"]}).startswith("````{ .text .output }\n")
    style = (ROOT / "docs" / "site.css").read_text()
    assert re.search(r"\.output.*code \{[^}]*white-space: pre-wrap", style)


@pytest.mark.backend_free
def test_pictures_with_dark_colors_are_made_dark_once():
    style = (ROOT / "docs" / "site.css").read_text()
    (rules,) = re.findall(r'"slate"\] \.md-typeset img \{([^}]*)\}', style)
    dark = (ROOT / "docs" / "modes.svg").read_text().partition("prefers-color-scheme: dark")[2]
    assert dark
    # Its light titles are on its own dark page, not on the white one of a browser.
    assert re.search(r"^[^<]*\.page \{ fill: #0d1117 \}[^<]*\.title \{ fill: #e4e7eb \}", dark)
    assert '<rect class="page" width="840" height="300"' in dark
    assert "invert(1)" in rules
    assert "color-scheme: light;" in rules
