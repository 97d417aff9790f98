# Each target sets up what it needs; only Python >= 3.11 with pip and venv has to be
# there. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
COMPAT_VENV ?= .venv-compat
COMPAT_INSTALLED := $(COMPAT_VENV)/.installed
COMPAT_CONSTRAINTS := requirements/constraints-0.8.1.txt
PIP_FLAGS := -qq --no-input --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
SGLANG_FILES := $(wildcard tests/serving/requirements*.txt)
SGLANG_REQUIREMENTS := $(filter-out %nodeps.txt,$(SGLANG_FILES)) \
	$(filter %nodeps.txt,$(SGLANG_FILES))
# More arguments for pytest, for example PYTEST="-k plan -x".
PYTEST ?=

# A tiny model is faster on one thread than on several that wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests and demo make their own models: nothing may come from a hub.
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: help install demo test test-all test-serving test-serving-all test-contract \
	test-contract-all test-compat test-faults bench quality style clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED) ## the environment of all others, in .venv

# torch first and by itself: it is by far the largest download, and whichever build of
# the pinned version pip prefers here stays. Our own build uses the hatchling that is
# pinned, not one that pip downloads for it.
#
# torchvision comes with speculators, which never imports it, and transformers imports
# it wherever it is installed. The one on PyPI is linked against CUDA and does not load
# beside a CPU build of torch: there transformers works without it, and with it not.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@start=$$(date +%s)
	echo "installing into $(VENV) with $$($(PYTHON) --version) ..."
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
		echo "spec-export needs Python >= 3.11: make PYTHON=..." >&2
		exit 1
	}
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	pip="$(BIN)/python -m pip"
	$$pip install $(PIP_FLAGS) -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))"
	$$pip install $(PIP_FLAGS) -c $(CONSTRAINTS) hatchling editables
	$$pip install $(PIP_FLAGS) -c $(CONSTRAINTS) --no-build-isolation \
		-e '.[train,dev]'
	if ! $(BIN)/python -c 'import torchvision, torchaudio' 2>/dev/null; then
		echo "torchvision and torchaudio do not load beside this torch: removed"
		$$pip uninstall $(PIP_FLAGS) --yes torchvision torchaudio
	fi
	touch $@
	echo "install: $$(($$(date +%s) - start)) s"

demo: $(INSTALLED) ## train, export, finalize and verify a tiny draft on the CPU
	@start=$$(date +%s)
	PATH="$(abspath $(BIN)):$$PATH"
	run() { echo; echo "+ $$*"; "$$@"; }
	rm -rf demo_out
	run python recipes/make_tiny_target.py demo_out
	run spec-export check recipes/tiny_cpu.yaml
	run spec-export train --config recipes/tiny_cpu.yaml
	for export in demo_out/exports/step-*; do run spec-export show $$export; done
	run spec-export finalize demo_out/exports
	export=demo_out/exports/latest
	[[ ! -e demo_out/exports/best ]] || export=demo_out/exports/best
	run spec-export verify $$export --target demo_out/target --compare
	run spec-export show $$export --tensors
	run spec-export show $$export --launch --target demo_out/target
	echo "demo: $$(($$(date +%s) - start)) s"

test: $(INSTALLED) ## unit, judge and end-to-end tests; no network, no accelerator
	$(BIN)/python -m pytest -m 'not wide' $(PYTEST)

test-all: $(INSTALLED) ## the same with every mutant of every template
	$(BIN)/python -m pytest $(PYTEST)

# The real server, in an environment of its own: its pins and those of speculators do
# not meet. What *nodeps.txt lists comes without its requirements, which are made for
# CUDA.
$(SGLANG_INSTALLED): $(SGLANG_REQUIREMENTS)
	@start=$$(date +%s)
	echo "installing SGLang into $(SGLANG_VENV) ..."
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	for file in $^; do
		case $$file in *nodeps.txt) deps=--no-deps ;; *) deps= ;; esac
		$(SGLANG_VENV)/bin/python -m pip install $(PIP_FLAGS) $$deps -r $$file
	done
	touch $@
	echo "install SGLang: $$(($$(date +%s) - start)) s"

test-serving: $(INSTALLED) $(SGLANG_INSTALLED) ## a spread of drafts in the real SGLang
	SPEC_EXPORT_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/serving -m 'not wide' $(PYTEST)

test-serving-all: $(INSTALLED) $(SGLANG_INSTALLED) ## all of them
	SPEC_EXPORT_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/serving $(PYTEST)

test-contract: $(INSTALLED) ## our rules against the files of some SGLang releases
	$(BIN)/python -m pytest tests/contract -m 'not wide' $(PYTEST)

test-contract-all: $(INSTALLED) ## ... of all SGLang releases
	$(BIN)/python -m pytest tests/contract $(PYTEST)

# The oldest speculators that we train with; its pins and those of the newest do not
# meet. torchvision: as above.
$(COMPAT_INSTALLED): pyproject.toml $(COMPAT_CONSTRAINTS)
	@start=$$(date +%s)
	echo "installing the oldest speculators into $(COMPAT_VENV) ..."
	rm -rf $(COMPAT_VENV)
	$(PYTHON) -m venv $(COMPAT_VENV)
	pip="$(COMPAT_VENV)/bin/python -m pip"
	c="-c $(COMPAT_CONSTRAINTS)"
	$$pip install $(PIP_FLAGS) $$c "$$(grep '^torch==' $(COMPAT_CONSTRAINTS))"
	$$pip install $(PIP_FLAGS) $$c hatchling editables
	$$pip install $(PIP_FLAGS) $$c --no-build-isolation \
		-e '.[train]' jsonschema pytest pytest-timeout
	if ! $(COMPAT_VENV)/bin/python -c 'import torchvision, torchaudio' 2>/dev/null; then
		$$pip uninstall $(PIP_FLAGS) --yes torchvision torchaudio
	fi
	touch $@
	echo "install the oldest speculators: $$(($$(date +%s) - start)) s"

test-compat: $(COMPAT_INSTALLED) ## the hook and each family under speculators 0.8.1
	$(COMPAT_VENV)/bin/python -m pytest tests/compat tests/e2e/test_training_hook.py \
		tests/e2e/test_mtp_training.py $(PYTEST)

test-faults: $(INSTALLED) ## broken files, full disks, interrupted writes
	$(BIN)/python -m pytest tests/faults $(PYTEST)

bench: $(INSTALLED) ## the numbers of the README, each against its baseline
	$(BIN)/python -m pytest tests/bench -s $(PYTEST)

quality: $(INSTALLED) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

style: $(INSTALLED) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove environments, caches and what the demo made
	rm -rf $(VENV) $(SGLANG_VENV) $(COMPAT_VENV) build dist demo_out .mypy_cache \
		.pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
