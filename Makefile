# Two commands for a newcomer: `make demo` and `make test`. Everything else is for who works on the code.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# Where pip finds torch. PyPI's Linux wheel is a CUDA build; for a small CPU-only install:
#   make setup TORCH_INDEX="--extra-index-url https://download.pytorch.org/whl/cpu"
TORCH_INDEX ?=
CONSTRAINTS := scripts/constraints/dev.txt

.PHONY: help setup demo test test-slow test-apptainer check format bench clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv and install everything the demo and the tests need

# torch goes in first and by pip: resolvers that see it as one of many would choose another build.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "prorl_gym needs Python >= 3.11; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) uv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(TORCH_INDEX) torch
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint $(CONSTRAINTS) --editable '.[embedded,dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Roll out 8 math problems twice each with a real small model in real sandboxes
	$(BIN)/python -m prorl_gym demo

test: $(STAMP)  ## The fast tests
	$(BIN)/python -m pytest

test-slow: $(STAMP)  ## Tests of minutes rather than seconds: packaging, load
	$(BIN)/python -m pytest -m slow

test-apptainer: $(STAMP)  ## Tests that build and run real images; needs Apptainer (scripts/install_apptainer.sh)
	$(BIN)/python -m pytest -m apptainer

check: $(STAMP)  ## Format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## Let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Print the benchmark tables, with ratios to this machine's floors; BENCH=--quick for fewer runs
	@for file in tests/benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file $(BENCH) || exit 1; done

clean:  ## Remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build rollouts.jsonl
