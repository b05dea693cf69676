# OLMo 3 reproduction. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3.11
RECIPE ?= tiny
RUN_DIR ?= runs/$(RECIPE)
SET ?=
FRESH ?=
DEBUG ?=
ONLY ?=
WHAT ?= data model evals convert
VENV := .venv
BIN := $(VENV)/bin
REPRO := $(BIN)/repro
FLAGS = --run-dir '$(RUN_DIR)' $(foreach s,$(SET),--set '$(s)') $(if $(DEBUG),--debug)
STAGES := tokenize order init gate reference train convert parity evaluate report

.DEFAULT_GOAL := help
.PHONY: help setup reproduce $(STAGES) serve status test proofs bench calibration plan resume-campaign faults dolma-fixture dataflow-template lint clean

help: ## list the targets
	@grep -hE '^[a-z|$$()A-Z_-]+:.*## ' $(MAKEFILE_LIST) | sed 's/\$$(STAGES)/<stage>/' | awk -F':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'
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

serve: $(VENV)/.ready ## Prefect UI, deployments, worker and the watch over landmarks, until Ctrl-C
	@$(REPRO) serve $(RECIPE) $(FLAGS)

status: $(VENV)/.ready ## what is done in a run directory
	@$(REPRO) status $(RECIPE) --run-dir '$(RUN_DIR)'

test: $(VENV)/.ready ## the test suite
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests $(PYTEST_FLAGS)

proofs: $(VENV)/.ready ## the long proofs that `make test` leaves out
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests -m slow_proof $(PYTEST_FLAGS)

bench: $(VENV)/.ready ## benchmarks, side by side with the reference tools: WHAT="data model evals convert"
	@for b in $(WHAT); do JAX_PLATFORMS=cpu PYTHONPATH=. $(BIN)/python tests/benchmarks/bench_$$b.py || exit 1; done

calibration: $(VENV)/.ready ## how often the verdict is wrong, on simulated runs: docs/calibration.md (minutes)
	@JAX_PLATFORMS=cpu $(BIN)/python -m evals.calibration --simulations 1000 --out docs/calibration.md

plan: $(VENV)/.ready ## compile the published recipes for TPU slices on this machine
	@for t in v5p:4x4x4 v6e:16x16 tpu7x:4x4x4; do $(REPRO) plan olmo3_7b_stage1 --topology $$t || exit 1; done
	@$(REPRO) plan olmo3_32b_stage1 --topology v5p:8x8x8

resume-campaign: $(VENV)/.ready ## kill training at random moments, then disturb every other stage; all must end bit-equal or named
	@JAX_PLATFORMS=cpu $(BIN)/python tests/campaigns/resume.py --out docs/resume-campaign
	@JAX_PLATFORMS=cpu $(BIN)/python tests/campaigns/crash.py --fresh --out docs/crash-campaign

faults: $(VENV)/.ready ## put each known mistake into our side, record who notices: docs/faults.md; ONLY="name ..."
	@JAX_PLATFORMS=cpu PYTHONPATH=.:tests/campaigns $(BIN)/python -m faults $(if $(ONLY),--only $(ONLY),--fresh --docs docs/faults)

dolma-fixture: $(VENV)/.ready ## make the dolma toolkit's fixture again, in an environment of its own
	@$(BIN)/python tests/benchmarks/dolma_toolkit.py make .venv-dolma && $(BIN)/python tests/benchmarks/dolma_toolkit.py fixture .venv-dolma

dataflow-template: $(VENV)/.ready ## build the Dataflow job offline and check its graph, in an environment of its own
	@$(BIN)/python tests/benchmarks/dataflow_template.py make .venv-dataflow && .venv-dataflow/bin/python tests/benchmarks/dataflow_template.py check

lint: $(VENV)/.ready ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy

clean: ## remove caches (not .venv, not runs)
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
