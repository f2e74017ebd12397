"""Runs the notebooks from top to bottom, and keeps of their outputs what is worth keeping.

    python notebooks/refresh.py 01_quickstart        # one; without names, all of them

Run it in the environment of `pip install '.[notebooks,tensorflow-cpu]'`. Kept are
what cells print and show. Left out are what libraries log, progress bars, the times of execution
and the state of widgets.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent
TIMEOUT_S = 120
_BAR = "━"


def run(path: pathlib.Path) -> nbformat.NotebookNode:
    """Runs a notebook in a fresh kernel, in a folder of its own.

    Args:
        path: the notebook.

    Returns:
        The notebook with its new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    return notebook


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leaves out of a notebook's outputs what differs from machine to machine."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _kept(cell.outputs)
    return notebook


def _kept(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs without logs and progress bars; what was printed in pieces is one piece."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name == "stdout":
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            lines = re.split(r"[\r\x08\n]+", re.sub(r"\x1b\[[0-9;]*m", "", output.text))
            output.text = "".join(f"{line}\n" for line in lines if line and _BAR not in line)
    return [one for one in kept if one.output_type != "stream" or one.text]


def main() -> None:
    """Runs the notebooks that are named, and writes them."""
    parser = argparse.ArgumentParser(prog="python notebooks/refresh.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="of notebooks, without .ipynb; all by default")
    names = parser.parse_args().names
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(clean(run(path)), path)


if __name__ == "__main__":
    main()
