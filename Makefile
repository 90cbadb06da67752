# Each target works as the only command on a fresh machine with Python >= 3.11 (venv and pip).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN_ENV := $(VENV)/.installed
TEST_ENV := $(VENV)/.installed-test
DOCS_ENV := $(VENV)/.installed-docs
# Tests run side by side, files whole, one more than there are cores: while some wait for processes
# to start or to end, the others go on.
JOBS   ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# The C++ that would otherwise be compiled at first use.
COMPILE = for room in kernels constrained runtime.speculate; do $(BIN)/python -m stemma.$$room.native.bindings; done

COVERAGE := --cov --cov-config=pyproject.toml --cov-report=term:skip-covered --cov-report=html

.PHONY: help demo test test-coverage test-lowest audit check dist docs bench soak clean
help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Stemma needs Python 3.11 or newer; try: make PYTHON=python3.11 demo")'
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(RUN_ENV): pyproject.toml | $(BIN)/python
	@echo "== installing stemma-lm and what it needs (first run only; torch is large)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@$(COMPILE)
	@touch $@

$(TEST_ENV): pyproject.toml | $(BIN)/python
	@echo "== installing stemma-lm with its test dependencies (first run only)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@$(COMPILE)
	@touch $@ $(RUN_ENV)

$(DOCS_ENV): pyproject.toml | $(BIN)/python
	@echo "== installing stemma-lm with what builds its documentation (first run only)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

demo: $(RUN_ENV)  ## install and run the main job on the embedded model
	$(BIN)/stemma demo

test: $(TEST_ENV)  ## install and run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --durations=15

test-coverage: $(TEST_ENV)  ## the same, and which lines ran: a table, and pages under build/coverage/
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(COVERAGE)

test-lowest: $(TEST_ENV)  ## the tests that stand on dependencies, with the lowest versions declared
	@.ci/test-lowest

audit: $(TEST_ENV)  ## known vulnerabilities of the lowest and of the installed versions
	@.ci/audit

check: $(TEST_ENV)  ## format, lint, links of the docs, types (mypy strict on the installed package)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/check_docs.py
	@rm -rf build/check build/lib build/bdist*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/check .
	MYPYPATH=build/check $(BIN)/mypy -p stemma

dist: $(TEST_ENV)  ## an sdist, a wheel, and wheels with compiled libraries: dist/
	@rm -rf build/lib build/bdist*
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python .ci/wheels.py "$$(ls -t dist/*-none-any.whl | head -1)"

docs: $(DOCS_ENV)  ## the documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(TEST_ENV)  ## the benchmarks: tables, and JSON under build/bench/
	$(BIN)/stemma bench schedule
	$(BIN)/stemma bench schedule --chunking
	$(BIN)/stemma bench programs --simulate
	$(BIN)/stemma bench dsl
	$(BIN)/stemma bench latency
	$(BIN)/stemma bench radix
	$(BIN)/stemma bench startup
	$(BIN)/stemma bench threads

soak: $(TEST_ENV)  ## the long random runs
	$(BIN)/python -m pytest -q -m slow --timeout=0

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info
