# make demo         trains a small drafter here, from rows to report
# make test         runs the tests
# make test-e2e     runs deployments on a server and worker of their own, and kills them
# make test-ui      looks at a run in a real browser (needs chromium)
# make screenshots  does the same and writes docs/flow-run.png
# make test-kill    kills 30 training runs at random, a rank and a node of torchrun
# make check        format, lint, types, import contracts
# make bench        runs the benchmarks
# make setup        makes .venv; the targets above do it themselves
# make setup-bench  adds the peers that benchmarks compare with
# make clean        removes .venv and build output, not var/

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DFLASH_HOME ?= $(CURDIR)/var

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench demo test test-e2e test-ui screenshots test-kill check bench clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh test

setup-bench:
	@PYTHON=$(PYTHON) scripts/setup.sh bench

demo: setup
	@$(BIN)/python scripts/fetch_demo_target.py
	@$(BIN)/dflash-train demo

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-e2e: setup
	@$(BIN)/python -m pytest -m e2e tests/e2e

test-ui: setup
	@$(BIN)/python -m pytest -m ui tests/e2e

screenshots: setup
	@DFLASH_SCREENSHOTS=1 $(BIN)/python -m pytest -m ui tests/e2e

test-kill: setup
	@OMP_NUM_THREADS=1 KILL_ROUNDS=30 $(BIN)/python -m pytest -s tests/dflash/training/test_kill.py tests/dflash/test_distributed.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup-bench
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
