# Every target sets up what it needs by itself; the virtual environment is made anew only when pyproject.toml changes.
# `make up ARGS="--prefill 2 --decode 2"` and `make test ARGS="tests/unit -k hash"` pass arguments on.

PYTHON_BIN := .venv/bin
CORES := $(shell nproc)

.PHONY: up test test-faults soak check test-gpu sanitize-gpu bench proto fmt clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

up: .venv/serve.stamp  ## start a cluster on this host and ask it something; Ctrl-C stops it
	@$(PYTHON_BIN)/pdserve up $(ARGS)

test: .venv/dev.stamp  ## every test that needs no GPU
	$(PYTHON_BIN)/python -m pdserve.model_store
	OMP_NUM_THREADS=$(CORES) $(PYTHON_BIN)/python -m pytest -m "not gpu" $(ARGS)

test-faults: .venv/dev.stamp  ## the whole fault matrix, about half an hour; writes its table into docs/operations.md
	OMP_NUM_THREADS=1 $(PYTHON_BIN)/python -m tests.faults --table $(ARGS)

soak: .venv/dev.stamp  ## 1,000 random fault schedules under load, about five hours; ARGS="--seed N" replays one
	OMP_NUM_THREADS=1 $(PYTHON_BIN)/python -m tests.faults.soak $(ARGS)

test-gpu: .venv/dev.stamp  ## the tests of the GPU kernels
	$(PYTHON_BIN)/python -m pytest -m gpu $(ARGS)

sanitize-gpu: .venv/dev.stamp  ## the GPU kernels at tiny sizes under compute-sanitizer
	scripts/sanitize_gpu.sh $(PYTHON_BIN)/python

check: .venv/dev.stamp  ## lint, format, types, who imports whom, generated code
	$(PYTHON_BIN)/ruff check .
	$(PYTHON_BIN)/ruff format --check .
	$(PYTHON_BIN)/mypy
	$(PYTHON_BIN)/lint-imports
	$(PYTHON_BIN)/python scripts/proto.py --check

bench: .venv/dev.stamp  ## what this machine can measure, beside peers, limits and targets; ARGS="--list" names the parts
	$(PYTHON_BIN)/python -m bench.targets $(ARGS)

proto: .venv/dev.stamp  ## generate pdserve/v1 from protos/
	$(PYTHON_BIN)/python scripts/proto.py

fmt: .venv/dev.stamp  ## format, and fix what can be fixed
	$(PYTHON_BIN)/ruff format .
	$(PYTHON_BIN)/ruff check --fix .

clean:  ## remove the virtual environment and the tools' caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

.venv/serve.stamp: pyproject.toml scripts/setup.sh
	@scripts/setup.sh serve,bench
	@touch $@

.venv/dev.stamp: pyproject.toml scripts/setup.sh
	@scripts/setup.sh serve,bench,dev
	@touch .venv/serve.stamp $@
