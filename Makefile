# Two commands do it all on a fresh machine: `make chat` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m-instruct
ARGS   ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip
INPUTS  := pyproject.toml constraints.txt $(wildcard setup.py) \
           $(shell find src/kakeya/kernels -name '*.cpp' -o -name '*.h' -o -name '*.hpp' 2>/dev/null)
RUNTIME := $(VENV)/.installed-runtime
DEV     := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup chat test check format bench clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

chat: $(RUNTIME) ## talk to the default model (MODEL=name, ARGS="--window 512 ...")
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	@$(BIN)/kakeya chat --model $(MODEL) $(ARGS)

test: $(DEV) ## run every test with branch coverage (ARGS="-k name" for some)
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	$(BIN)/python -m pytest --cov $(ARGS)

check: $(DEV) ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(RUNTIME) ## measure the engine (ARGS="--peers" beside llama.cpp)
	@$(BIN)/kakeya bench engine --model $(MODEL) $(ARGS)

setup: $(DEV) ## make the virtual environment with everything in it

clean: ## remove what was built; the model cache stays
	rm -rf $(VENV) build dist src/*.egg-info .coverage .coverage.* htmlcov \
	  .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src -name '*.so' -delete

# A virtual environment is made once; a stamp newer than its inputs makes the next run instant.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(INPUTS) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(RUNTIME)
