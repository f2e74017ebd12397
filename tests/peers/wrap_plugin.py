"""A pytest plugin: Keras's own tests, with the models they train made parallel.

Modes: `plain` only records outcomes; `models` makes models of Keras's test classes that are a
trainer and a layer in one, for comparison; `wrapped` also trains them by a parallel model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
from typing import Any

import pytest

_DEVICES = 2


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("keras_multigpu")
    group.addoption("--mode", default="plain", choices=["plain", "models", "wrapped"])
    group.addoption("--devices", type=int, default=_DEVICES)
    group.addoption("--no-calls", action="store_true", help="leave `model(x)` plain")
    group.addoption("--with-save", action="store_true", help="write whole models in parallel")
    group.addoption("--any-batch", action="store_true", help="leave out fixed batch sizes")
    group.addoption("--outcomes", type=pathlib.Path, help="where to write them, as JSON")


def pytest_configure(config: Any) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: one of Keras's own")
    mode = config.getoption("--mode")
    if mode == "plain":
        recorder: Any = Recorder(config)
    else:
        recorder = Wrapper(config, mode)
    config.pluginmanager.register(recorder, "keras_multigpu_recorder")


class Recorder:
    """Writes what became of each test."""

    def __init__(self, config: Any):
        self.path = config.getoption("--outcomes")
        self.outcomes: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        test = f"{item.cls.__name__}.{item.name}" if item.cls else item.name
        entry = self.outcomes.setdefault(test, {"outcome": "passed", "error": ""})
        entry.update(getattr(item, "wrapping", {}))
        if report.outcome != "passed" and entry["outcome"] == "passed":
            entry["outcome"] = report.outcome
            if report.failed:
                lines = str(call.excinfo.exconly()).strip().splitlines()
                entry["error"] = lines[0] if lines else ""
        return report

    def pytest_sessionfinish(self) -> None:
        if self.path:
            self.path.write_text(json.dumps(self.outcomes, indent=1))


class Wrapper(Recorder):
    """Makes the models of a test parallel while it runs, and counts their calls."""

    def __init__(self, config: Any, mode: str):
        super().__init__(config)
        self.wrapped = mode == "wrapped"
        self.any_batch = config.getoption("--any-batch")
        self.options = (
            config.getoption("--devices"),
            not config.getoption("--no-calls"),
            config.getoption("--with-save"),
        )
        package = importlib.import_module("keras_multigpu")
        package.use_virtual_devices(max(self.options[0], _DEVICES))
        self.wrapping = importlib.import_module("wrapping")
        self.trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        self.original = self.trainer.TensorFlowTrainer

    def pytest_collection(self) -> None:
        """The test modules that are imported now are given a model for a trainer."""
        self.trainer.TensorFlowTrainer = self.wrapping.model_trainer(self.original)

    def pytest_collection_finish(self) -> None:
        self.trainer.TensorFlowTrainer = self.original

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        wrapping = self.wrapping.Wrapping(*self.options)
        with contextlib.ExitStack() as stack:
            if self.any_batch:
                stack.enter_context(self.wrapping.any_batch_size())
            if self.wrapped:
                stack.enter_context(wrapping.active())
            try:
                return (yield)
            finally:
                item.wrapping = {"calls": wrapping.calls, "slicings": wrapping.slicings}
