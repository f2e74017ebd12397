# Two commands that do all the set-up: `make demo` and `make test`.
# Each makes and uses the virtual environment .venv; Python 3.10 or newer is all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build where there is no NVIDIA GPU: nobody downloads CUDA for a laptop.
TENSORFLOW := $(if $(shell command -v nvidia-smi),tensorflow,tensorflow-cpu)

.PHONY: demo test lint format clean

demo: $(VENV)/demo.installed
	$(BIN)/python -m keras_multigpu demo

test: $(VENV)/test.installed lint
	$(BIN)/pip install --quiet --force-reinstall --no-deps "$$(ls dist/*.whl)"
	cd $(VENV) && bin/python -c "import keras_multigpu as k; assert 'site-packages' in k.__file__"
	$(BIN)/pytest -n 2 --dist loadgroup
	KERAS_BACKEND=jax $(BIN)/pytest -n 2 --dist loadgroup

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SOURCES := pyproject.toml README.md $(shell find keras_multigpu -name '*.py')

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/wheel.built: $(VENV)/bin/pip $(SOURCES)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	touch $@

$(VENV)/demo.installed: $(VENV)/wheel.built
	$(BIN)/pip install --quiet "$$(ls dist/*.whl)[$(TENSORFLOW),demo]"
	$(BIN)/pip install --quiet --force-reinstall --no-deps "$$(ls dist/*.whl)"
	touch $@

$(VENV)/test.installed: $(VENV)/wheel.built
	$(BIN)/pip install --quiet "$$(ls dist/*.whl)[$(TENSORFLOW),test,lint]"
	$(BIN)/pip install --quiet --force-reinstall --no-deps "$$(ls dist/*.whl)"
	touch $@

clean:
	rm -rf $(VENV) dist build
