# make repro   the whole job: scheduler and report of every pair of `run` in params.yaml
# make test    lint, types, tests
# Both make their own environment in .venv when it is missing or older than pyproject.toml.

PYTHON ?= python3
# The version the project is tested with; where the package index has a CPU build of it, pip takes that. Newer or unpinned
# may pull a CUDA build of several GB. On a machine with a GPU: make repro TORCH=torch
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# Errors only: our own lines say what goes on. --no-compile: Python compiles what it imports, a small part of what comes.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input

# dvc calls `pipeline` by name.
export PATH := $(BIN):$(PATH)
# Nothing reports home.
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.DELETE_ON_ERROR:
.PHONY: repro test lint clean-env

# dvc wants to be told when the project is no git clone (a downloaded archive).
repro: $(VENV)/installed
	@git rev-parse --git-dir >/dev/null 2>&1 || dvc config --quiet --local core.no_scm true
	dvc repro

# One worker a core, and a file's tests in one worker, because they share what is dear to make.
test: lint
	OMP_NUM_THREADS=1 python -m pytest --numprocesses auto --dist loadfile

lint: $(VENV)/installed-dev
	ruff check
	ruff format --check
	mypy

# Stamps: written last, so that an interrupted installation is taken up again.
$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing the tools for development ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/installed: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "Installing $(TORCH) (some hundred MB) ..."
	@$(PIP) '$(TORCH)'
	@echo "Installing TreeGraft and what it needs ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TreeGraft needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Making the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

clean-env:
	rm -rf $(VENV)
