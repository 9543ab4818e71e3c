# Every everyday action. Each target works as the first command in a fresh clone: what it needs is
# set up first, once. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
SEED ?=
ARGS ?=

# Heavy targets (real engines) run one at a time on a machine, where flock exists.
LOCK_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/asyncrl
LOCK := $(LOCK_DIR)/heavy.lock
ONE_AT_A_TIME := $(if $(shell command -v flock 2>/dev/null),flock -o $(LOCK),)

.PHONY: help setup demo test test-fast test-slow check format bench-buffer bench-weights docs clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv with everything in it (4 minutes, once)

# Older than pyproject.toml means out of date. A broken set-up leaves no stamp and is made again.
$(READY): pyproject.toml asyncrl/launch/environment.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "set-up: there is no '$(PYTHON)': install Python 3.11, or name one: make PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
	  "set-up: Python 3.11 or newer is needed, %s is %d.%d. Name another one: make PYTHON=..." \
	  % ((sys.executable,) + v))'
	@$(PYTHON) asyncrl/launch/environment.py $(VENV)
	@touch $@

demo: $(READY) | lock  ## train SmolLM2-135M to add (6 minutes on 2 cores); SEED=1, ARGS="key=value"
	@$(ONE_AT_A_TIME) $(BIN)/asyncrl-launch local configs/demo.yaml $(if $(SEED),seed=$(SEED)) $(ARGS)

test: $(READY) | lock  ## all tests but the slow ones (20 minutes on 2 cores, 25 at most)
	@$(ONE_AT_A_TIME) $(BIN)/python -P -m pytest -m "not slow and not gpu" $(ARGS)

test-fast: $(READY)  ## what needs no engine and no program of its own (2 minutes at most)
	@$(BIN)/python -P -m pytest -m "not vllm and not e2e and not slow and not gpu" $(ARGS)

test-slow: $(READY) | lock  ## the tests that take minutes each
	@$(ONE_AT_A_TIME) $(BIN)/python -P -m pytest -m "slow and not gpu" $(ARGS)

check: $(READY)  ## lint, format, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(READY)  ## mend what ruff can mend
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench-buffer: $(READY) | lock  ## rollouts/s through the buffer, beside bare writes and echo (4 minutes)
	@$(ONE_AT_A_TIME) $(BIN)/python benchmarks/bench_buffer.py $(ARGS)

bench-weights: $(READY) | lock  ## what new weights cost learner and generator, with real vLLM (6 minutes)
	@$(ONE_AT_A_TIME) $(BIN)/python benchmarks/bench_weights.py $(ARGS)

docs: $(READY)  ## write docs/configuration.md anew from the field docs
	@$(BIN)/python -P -m asyncrl.config.reference > docs/configuration.md

clean:  ## remove .venv, runs (with what killed ones left in /dev/shm) and caches
	@for run in runs/*/; do [ ! -s "$$run/run_id" ] || rm -rf \
	  "/dev/shm/asyncrl-$$(basename "$$run")-$$(head -c 8 "$$run/run_id")"; done
	rm -rf $(VENV) runs wandb .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Says so before it waits for another heavy run.
.PHONY: lock
lock:
	@mkdir -p $(LOCK_DIR)
	@if command -v flock >/dev/null && ! flock -n $(LOCK) true; then \
	  echo "waiting for another heavy run on this machine to end (lock: $(LOCK))"; fi
