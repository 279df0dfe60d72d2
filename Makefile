# Each target sets up all that it needs. PYTHON names the interpreter that .venv is made from.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.ready-bench

# Test workers. Each gets one thread of torch, so that they do not fight for the cores.
JOBS  ?= 2
BENCH ?= all
ARGS  ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint test-all bench setup-bench constraints clean

help:
	@echo "make demo         train a small Kimi K3 on Python's own sources and let it write (about 5 minutes)"
	@echo "make test         lint, types and tests (under 10 minutes on two cores)"
	@echo "make test-all     the same, and the tests that take long"
	@echo "make bench        every benchmark, beside its peers; the rows go to bench.json"
	@echo "make setup        .venv with the package and what its tests need"
	@echo "make setup-bench  add the peers of the benchmarks to .venv"
	@echo "make clean        remove .venv and the caches"

setup: $(READY)
	@echo "openk3 is in $(VENV); try: $(BIN)/openk3 --help"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "openk3 needs Python >= 3.11, but '$(PYTHON)' is missing or older; say: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup-bench: $(PEERS)
	@echo "the peers are in $(VENV); try: $(BIN)/openk3 bench all"

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps fla-core
	@touch $@

demo: $(READY)
	$(BIN)/openk3 demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q -m "not slow" $(ARGS)

test-all: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q --timeout 3600 $(ARGS)

bench: $(PEERS)
	$(BIN)/openk3 bench $(BENCH) --json bench.json $(ARGS)

# Write down what is installed now, as the set of versions that the tests ran with. Which build of torch it is stays open.
constraints: $(PEERS)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt
	@touch $(READY) $(PEERS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
