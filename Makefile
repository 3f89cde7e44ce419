# A fresh machine needs make and Python 3.10 or newer with its venv module; the rest is installed into .venv.
# Another Python: `make demo PYTHON=python3.12`. One test: `make test PYTEST_ARGS="-k demo"`. Some
# benchmarks: `make bench BENCH_ARGS="--only launch"`.

PYTHON ?= python3
# Processes that the tests are spread over.
WORKERS ?= auto
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Of the engines only Python files are used, so any platform's wheel will do.
ENGINES := .engines
ENGINE_WHEELS := vllm==0.22.0 vllm==0.33.0 sglang==0.5.11
ANY_WHEEL := --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	$(foreach glibc,35 34 31 28 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64
# Not `.`: newer ruffs would also reformat the code in Markdown files, which is laid out by hand.
CODE := $(wildcard streamshim tests examples benchmarks)

.DEFAULT_GOAL := help
.PHONY: help demo test test-engines lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.for-demo ## show a kernel that goes missing from a CUDA graph, and what streamshim does about it
	@$(BIN)/python -m streamshim demo

test: lint ## lint, then run the tests
	@echo "==> pytest"
	@$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-engines: $(VENV)/.for-test $(ENGINES)/.downloaded ## test the plugins under the loaders of vLLM and SGLang
	@echo "==> pytest tests/startup/test_engines.py"
	@STREAMSHIM_ENGINES=$(ENGINES) $(BIN)/python -m pytest $(PYTEST_ARGS) tests/startup/test_engines.py

lint: $(VENV)/.for-test ## ruff (rules and format) and mypy
	@echo "==> ruff check"
	@$(BIN)/ruff check --quiet $(CODE)
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --quiet --check $(CODE)
	@echo "==> mypy"
	@$(BIN)/mypy

bench: $(VENV)/.for-test ## measure what streamshim costs here, and hold it to its budgets
	@$(BIN)/python -m benchmarks --json build/bench.json $(BENCH_ARGS)

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, which are older than what they depend on when something has to be installed again.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; name one with PYTHON=")'
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# CuTe DSL is not there for every platform and Python; the demo can do without it, and says so. Without numpy, torch
# warns when it is imported.
$(VENV)/.for-demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> installing what the demo needs (torch and CuTe DSL; this takes a while the first time)"
	@$(INSTALL) numpy -e ".[cute]" || { echo "==> that failed; trying without CuTe DSL"; $(INSTALL) numpy -e .; }
	@touch $@

$(VENV)/.for-test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> installing what the tests need (this takes a while the first time)"
	@$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.for-demo

$(ENGINES)/.downloaded: $(VENV)/.made Makefile
	@echo "==> downloading vLLM and SGLang (600 MB)"
	@mkdir -p $(ENGINES)
	@for wheel in $(ENGINE_WHEELS); do $(BIN)/python -m pip download -qq $(ANY_WHEEL) -d $(ENGINES) $$wheel || exit 1; done
	@$(BIN)/python -m pip install -qq --upgrade --target $(ENGINES)/requirements regex
	@touch $@
