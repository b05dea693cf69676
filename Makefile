# OLMo 3 reproduction. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3.11
RECIPE ?= tiny
RUN_DIR ?= runs/$(RECIPE)
SET ?=
FRESH ?=
DEBUG ?=
VENV := .venv
BIN := $(VENV)/bin
REPRO := $(BIN)/repro
FLAGS = --run-dir $(RUN_DIR) $(foreach s,$(SET),--set '$(s)') $(if $(DEBUG),--debug)
STAGES := tokenize order init gate reference train convert parity evaluate report

.DEFAULT_GOAL := help
.PHONY: help setup reproduce $(STAGES) status test lint bench clean

help: ## list the targets
	@grep -hE '^[a-z|$$()A-Z_-]+:.*## ' $(MAKEFILE_LIST) | sed 's/\$$(STAGES)/<stage>/' | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'
	@echo "  stages: $(STAGES)"
	@echo "  variables: RECIPE=tiny  RUN_DIR=runs/tiny  SET=\"train.steps=40 ...\"  FRESH=1  DEBUG=1  PYTHON=python3.11"

# Everything is in the lock, so nothing is resolved: two data packages pin versions that we do not use.
$(VENV)/.ready: requirements.lock pyproject.toml
	@echo "setting up $(VENV) (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup: $(VENV)/.ready ## create .venv from the pinned requirements

reproduce: $(VENV)/.ready ## the whole chain: RECIPE, SET, FRESH=1; exit 0 only for FAITHFUL
	@$(REPRO) reproduce $(RECIPE) $(FLAGS) $(if $(FRESH),--fresh)

$(STAGES): $(VENV)/.ready ## one stage of a run directory, for instance `make train`
	@$(REPRO) $@ $(RECIPE) $(FLAGS)

status: $(VENV)/.ready ## what is done in a run directory
	@$(REPRO) status $(RECIPE) --run-dir $(RUN_DIR)

test: $(VENV)/.ready ## the test suite
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests $(PYTEST_FLAGS)

lint: $(VENV)/.ready ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . ; $(BIN)/mypy

clean: ## remove caches (not .venv, not runs)
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
