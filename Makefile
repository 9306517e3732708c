# Every target makes or reuses the environment it needs; a fresh machine needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
BENCH  ?= extents cpu_copies put_get registry region
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench dist clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt $(wildcard backends/*/pyproject.toml) $(wildcard backends/*/hatch_build.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt -e '.[demo,testing]' --group dev
	for backend in $(wildcard backends/*/pyproject.toml); do $(PIP) --no-deps -e $$(dirname $$backend) || exit 1; done
	touch $@

demo: $(STAMP) ## encode, offload, reload and verify photographs on the CPU (about 2 minutes the first time)
	$(BIN)/ecoffload demo

test: $(STAMP) ## lint, types and the test suite on CPU torch
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -q

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## the figures of benchmarks/ against their bars; the last line is "N below"
	$(BIN)/python benchmarks/figures.py $(BENCH)

clean: ## remove environments and caches
	rm -rf .venv .venv-* .cache build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
