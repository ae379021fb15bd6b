# make demo    the main job, on nothing but Python and a C compiler
# make test    lint, types, tests (what CI runs)
# make test-full   the long checks too
PYTHON ?= python3
BIN := .venv/bin
# Two test processes of one thread each are faster than two that fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto
STAMP := .venv/.installed

.PHONY: demo test test-full lint setup clean

demo: setup
	$(BIN)/vitrefine models --papers

test: lint
	$(PYTEST) -m "not full"

test-full: lint
	$(PYTEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv
