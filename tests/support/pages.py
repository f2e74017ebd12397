"""The repository's pages for people."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")),
    ROOT / "tests/README.md",
    ROOT / "tests/support/fuzz.md",
]
