# make demo    the main job: compare five small models on handwritten digits, and write a page
# make test    lint, types, tests (what CI runs)
# make test-full   the long checks too
PYTHON ?= python3
BIN := .venv/bin
# Two test processes of one thread each are faster than two that fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto
STAMP := .venv/.installed

.PHONY: demo test test-full lint setup clean

# One thread: two that wait for each other lose more on a busy machine than they win on a quiet one.
demo: setup
	OMP_NUM_THREADS=1 $(BIN)/vitrefine compare "vit_tiny_patch16_224(depth=2,embed_dim=64,num_heads=4)" \
		+cb +cb_s +refiner "lit_ti(depths=[1,1,2,1],embed_dims=[16,32,64,128],num_heads=[1,2,2,4])" \
		--data digits --seeds 3 --out runs/demo --resume

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
