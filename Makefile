# The few commands of this repository. Each sets up what it needs; CI calls only these.

# python3.11 where there is one; else python3, whose version is checked below.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
# The short standard set; BENCH="..." replaces it.
BENCH ?= --peer hf --dtype bf16 --threads 2 --draft ngram --prompt-sets code,chat,summarise \
  --concurrency 1,16 --num-prompts 3 --max-tokens 48 --repeats 2 --json bench.json

# Two threads that spin beside each other are 30 times slower than one that works.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# DeepSpeed compiles nothing at install: Outrider uses its AutoTP, none of its kernels.
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test bench soak check protos baseline constraints clean

help: ## List the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/.installed ## Serve the CI model with a draft on this machine and stream from it
	$(BIN)/outrider models prepare $(MODEL)
	$(BIN)/outrider demo

test: $(VENV)/.installed ## Run every test: unit, contract, integration (GPU tests where there is a GPU)
	$(BIN)/outrider models prepare $(MODEL)
	$(BIN)/pytest

# Two threads that hand small products to each other: a bounded spin, for both sides of the comparison.
bench: export OMP_NUM_THREADS := 2
bench: export GOMP_SPINCOUNT := 20000
bench: $(VENV)/.installed ## Measure ourselves against plain decoding and transformers, at most 8 minutes
	$(BIN)/outrider models prepare $(MODEL)
	$(BIN)/outrider bench $(BENCH)

soak: $(VENV)/.installed ## Many streams, aborts, slow readers, bad requests; SECONDS=900 for the long one, SOAK="--engine scripted"
	$(BIN)/outrider models prepare $(MODEL)
	$(BIN)/outrider soak --seconds $(or $(SECONDS),300) $(SOAK)

check: $(VENV)/.installed ## Lint, format, types, dependency rules, stub drift, contract, manifests, dashboards and alerts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh --check
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/python -m infra.observability.dashboards.write --check
	$(BIN)/pytest -q tests/unit/infra
	@if command -v promtool >/dev/null; then \
	  promtool check rules infra/observability/prometheus/rules.yaml && \
	  promtool test rules infra/observability/prometheus/rules_test.yaml; \
	else \
	  echo "SKIPPED: the alerting rules, for promtool is not installed (Debian: apt-get install prometheus)" >&2; \
	fi

protos: $(VENV)/.installed ## Regenerate the stubs in services/outrider/v1 from protos/
	PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh

baseline: $(VENV)/.installed ## Release the contract: later changes must stay compatible with it
	$(BIN)/buf build protos --exclude-source-info -o protos/baseline.binpb

constraints: $(VENV)/.installed ## Rewrite constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude outrider > $(VENV)/freeze.txt
	grep '^#' constraints.txt > $(VENV)/constraints.txt
	sed -E '/^(-e |grpcio-tools==|mypy-protobuf==)/d; s/\+[a-z0-9.]+$$//' $(VENV)/freeze.txt >> $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean: ## Remove the environment and every cache in the tree
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find cluster services tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "Outrider needs Python 3.11 or 3.12, and '$(PYTHON)' is not: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps --group protos
	touch $@
