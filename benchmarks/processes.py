"""One process for each measurement, and tables of the results.

A measurement is a module of this package, run as `python -m`, whose last line on stdout is a JSON
object. A separate process gives every side the same fresh start: devices can't be configured twice,
and what one side allocates, caches or breaks doesn't affect the next.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import socket
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# The place in a graph that TensorFlow writes before a message.
_PLACE = re.compile(r"\{\{.*?\}\}")
_PREFACE = ("Graph execution error:", "Detected at node", "<stack traces", 'File "')


def run_module(
    module: str,
    *arguments: str | Mapping[str, Any],
    timeout: float = 900.0,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a module in a separate process and returns the JSON object that it prints.

    Args:
        module: the module's full name.
        *arguments: its command line; a mapping becomes a JSON object.
        timeout: seconds after which the process is killed.
        python: the interpreter that runs it.
        environment: environment variables to add to those of this process.

    Returns:
        The object; `{"error": "..."}` if the process died or was killed before it printed one.
    """
    words = (one if isinstance(one, str) else json.dumps(one) for one in arguments)
    command = [python, "-m", module, *words]
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=variables, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        return {"error": shorten(f"process ended with code {done.returncode}: {lines[-1]}")}
    return json.loads(done.stdout.splitlines()[-1])


def answer(
    function: Callable[..., dict[str, Any]], versions: Sequence[str], request: str | None = None
) -> None:
    """Answers a request of `run_module` by a function, in the measuring process.

    An exception is a result too: the table shows it instead of a figure.

    Args:
        function: takes the request's entries by name, and returns the figures.
        versions: modules whose versions are added if they were loaded.
        request: a JSON object; `None` for the first word of the command line.
    """
    try:
        result = function(**json.loads(sys.argv[1] if request is None else request))
    except Exception as error:
        result = {"error": describe(error)}
    loaded = {name: sys.modules[name] for name in versions if name in sys.modules}
    result["versions"] = {
        name: getattr(module, "VERSION", None) or module.__version__
        for name, module in loaded.items()
    }
    print(json.dumps(result))


def describe(error: BaseException) -> str:
    """An exception's type and the first meaningful line of its text.

    Without a text, it names the function that raised the exception.
    """
    lines = [_PLACE.sub("", line).strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(_PREFACE)]
    frames = traceback.extract_tb(error.__traceback__)
    place = f"(no text) in {frames[-1].name}" if frames else "(no text)"
    return shorten(f"{type(error).__name__}: {telling[0] if telling else place}")


def shorten(text: str, length: int = 110) -> str:
    """A text of one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def host() -> str:
    """The date, the number of processor cores and the Python version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return f"{date}, {cores} cores ({platform.machine()}), Python {platform.python_version()}"


def merge_versions(results: Iterable[Mapping[str, Any]]) -> str:
    """The versions in the measurements' `"versions"`, each library once."""
    pairs = {pair for result in results for pair in result.get("versions", {}).items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(pairs))


def report_setting(results: Iterable[Mapping[str, Any]], setting: str) -> None:
    """Prints the host, the versions in the measurements, and what else the figures depend on."""
    print(f"- {host()}\n- {merge_versions(results)}\n- {setting}\n")


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark's command line, whose help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def peak_mib() -> float:
    """The most memory that this process has had; not on Windows."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show_rounds(values: Sequence[float], digits: int = 0) -> str:
    """The median, with the lowest and the highest value if there are several."""
    middle, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}..{high})" if len(values) > 1 else middle


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: figures right-aligned, the first column left-aligned."""
    rules = ["---", *("---:" for _ in header[1:])]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rules, *escaped])


def progress(text: str) -> None:
    """Writes a line to stderr."""
    print(text, file=sys.stderr, flush=True)
