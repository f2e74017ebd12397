"""Lists the tests that are not quick: `python -m support.slow results.xml > slow_jax.txt`.

`results.xml` is what `pytest --junitxml=results.xml` has written with that backend. `conftest.py`
marks what is listed as `slow`. A function stands for all its cases.
"""

import collections
import sys
import xml.etree.ElementTree as ElementTree

LONG = 1.3  # seconds, of a quiet machine
ALWAYS = (  # what each run shows, however long it takes
    "tests/cluster/test_out_of_step.py::test_all_name_the_one_that_falls_out_of_step[stops_after_an",
    "tests/cluster/test_processes.py::test_two_processes_compute_what_one_device_does",
    "tests/docs/test_documents.py::test_an_epoch_of_the_demo",
    "tests/docs/test_pages.py::test_the_python_of_a_page_runs[README.md]",
    "tests/modes/test_parity_pairs.py::",
)


def listed(path, long=LONG):
    """The tests of a file of results that took longer, in order."""
    families = collections.defaultdict(list)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("classname").replace(".", "/")
        name = f"{file}.py::{case.get('name')}"
        is_long = float(case.get("time")) > long and not name.startswith(ALWAYS)
        families[name.partition("[")[0]].append((name, is_long))
    for family, cases in sorted(families.items()):
        if all(is_long for _, is_long in cases):
            yield family
        else:
            yield from (name for name, is_long in cases if is_long)


if __name__ == "__main__":
    sys.stdout.writelines(f"{one}\n" for one in listed(sys.argv[1], *map(float, sys.argv[2:])))
