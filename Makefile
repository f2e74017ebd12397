# Commands that do all the set-up: `make demo`, `make docs`, `make test` and `make test-all`.
# Each makes and uses the virtual environment .venv; Python 3.10 or newer is all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build where there is no NVIDIA GPU: nobody downloads CUDA for a laptop.
TENSORFLOW := $(if $(shell command -v nvidia-smi),tensorflow,tensorflow-cpu)

PYTEST := $(BIN)/pytest -n 2

.PHONY: demo test test-all test-every test-oldest test-keras installed lint format docs clean

demo: $(VENV)/demo.installed
	$(BIN)/python -m keras_multigpu demo

# About ten minutes on 2 cores, from a made environment.
test: installed lint
	$(PYTEST) -m "not slow"
	KERAS_BACKEND=jax $(PYTEST) -m "not slow"

# What `make test` leaves out: the site, notebooks, long waits, and all that takes seconds. A part
# of it runs, each day another (tests/README.md).
# In two halves: TensorFlow and JAX keep much of what a process has compiled, and only the second
# half waits for other processes, while a third worker can compute.
test-all: installed docs
	for backend in tensorflow jax; do \
	  KERAS_BACKEND=$$backend $(PYTEST) -m slow tests/modes && \
	  KERAS_BACKEND=$$backend $(PYTEST) -n 3 -m slow --ignore tests/modes || exit 1; \
	done

# All of them: an hour to two.
test-every:
	TEST_EVERY_CASE=1 $(MAKE) test-all

# The core tests on the lowest versions that pyproject.toml declares. Old packages warn.
CORE := $(addprefix tests/, modes graphs layers reports sparse zoo engines)
OLDEST := $(VENV)/oldest

test-oldest: $(VENV)/wheel.built
	for backend in tensorflow-cpu jax; do \
	  $(PYTHON) -m venv --clear $(OLDEST)-$$backend && \
	  $(PYTHON) tests/support/oldest.py $$backend > $(OLDEST)-$$backend/constraints.txt && \
	  $(OLDEST)-$$backend/bin/pip install --quiet -c $(OLDEST)-$$backend/constraints.txt \
	    "$$(ls dist/*.whl)[$$backend,demo,reports,sparse-numba]" \
	    hypothesis ipykernel nbclient nbformat polars pydot pytest pytest-xdist && \
	  KERAS_BACKEND=$${backend%-cpu} $(OLDEST)-$$backend/bin/pytest -n 2 -W default \
	    -m "not slow" $(CORE) --ignore tests/engines/cluster \
	    --ignore tests/engines/$$([ $$backend = jax ] && echo tensorflow || echo jax)/ || exit 1; \
	done

# Keras's own tests, plain and with their models made parallel; prints what passes. Up to an hour.
test-keras: installed
	$(BIN)/pip install --quiet absl-py grain
	$(BIN)/python tests/peers/run_keras_tests.py --any-batch

# The tests run on the built package, not on the checkout.
installed: $(VENV)/test.installed
	$(BIN)/pip install --quiet --force-reinstall --no-deps "$$(ls dist/*.whl)"
	cd $(VENV) && bin/python -c "import keras_multigpu as k; assert 'site-packages' in k.__file__"

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages as a site in build/site. The search box needs a server, the pages don't.
docs: $(VENV)/docs.installed
	$(BIN)/mkdocs build --strict --quiet
	@echo "Now: $(BIN)/python -m http.server --directory build/site"

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

$(VENV)/docs.installed: $(VENV)/wheel.built
	$(BIN)/pip install --quiet "$$(ls dist/*.whl)[docs]"
	touch $@

clean:
	rm -rf $(VENV) dist build
