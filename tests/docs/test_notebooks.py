"""The notebooks are run from top to bottom; what they claim is asserted in their cells."""

import base64
import pathlib

import keras
import nbformat
import pytest
from support.scripts import load

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
# On JAX layers can't be on one device by name, and machines are joined in another way: the
# notebooks say so in their first cells.
TENSORFLOW_ONLY = ("05_two_gpus_or_one", "06_cluster")
HERE = [
    path
    for path in PATHS
    if keras.backend.backend() == "tensorflow" or path.stem not in TENSORFLOW_ONLY
]


def kinds(notebook):
    """What each cell of code shows: the kinds of its outputs."""
    return [
        [output.output_type if "data" not in output else sorted(output.data) for output in one]
        for one in (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path):
    script = load(FOLDER / "refresh.py")
    committed = nbformat.read(path, as_version=4)
    found = script.clean(script.run(path))
    assert kinds(found) == kinds(committed)


@pytest.mark.backend_free
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    pictures = [
        base64.b64decode(output.data["image/png"])
        for cell in code
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert sum("assert " in cell.source for cell in code) >= 2
    assert 'pip install ".[notebooks,' in notebook.cells[0].source
    text = path.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert str(pathlib.Path.home()) + "/" not in text
    assert "/site-packages/" not in text
    assert "/tmp/" not in text
    assert "application/vnd.jupyter.widget" not in text
    assert '"stderr"' not in text


@pytest.mark.backend_free
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_virtual_devices_are_for_hosts_without_gpus(path):
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    calls = [cell for cell in code if "use_virtual_devices(" in cell.source]
    assert bool(calls) != (path.stem == "06_cluster")  # its devices are those of servers
    for cell in calls:
        assert cell.source.count("use_virtual_devices(") == 1
        assert "\nif len(gpus) < 2:\n    keras_multigpu.use_virtual_devices(" in cell.source
        assert "virtual devices\n" in cell.outputs[0].text


@pytest.mark.backend_free
def test_outputs_are_cleaned():
    script = load(FOLDER / "refresh.py")
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="log"),
        nbformat.v4.new_output("stream", name="stdout", text="\r0/1 ━━━"),
        nbformat.v4.new_output("stream", name="stdout", text="\x08\x08\r1/1 ━━━ 0s\n\x1b[1mdone"),
        nbformat.v4.new_output("display_data", data={"text/plain": "x"}),
        nbformat.v4.new_output("stream", name="stdout", text="━"),
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, metadata={"execution": {"a": "b"}})
    cell.execution_count = 3
    notebook = script.clean(nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}}))
    assert [one.get("text") for one in cell.outputs] == ["done\n", None]
    assert cell.metadata == {}
    assert "widgets" not in notebook.metadata
