# Two commands do it all on a fresh machine: `make chat` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m-instruct
# Two processes share the test files: one alone leaves half of two cores idle. The order stays, since the longest test comes first.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
ARGS   ?=
# What needs no server process, no browser, no foreign client and no GPU.
QUICK  ?= $(addprefix tests/,engine kernels models text sessions serving grpc_server http_server cli) \
          --ignore=tests/engine/cuda --ignore=tests/kernels/gpu

# Where the environment forbids Python to keep what it compiled, each of the tests' many processes compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

BIN     := $(VENV)/bin
# Python compiles what it imports; compiling all that is installed takes half a minute more.
INSTALL := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
INPUTS  := pyproject.toml constraints.txt $(wildcard setup.py) \
           $(shell find src/kakeya/kernels -name '*.cpp' -o -name '*.h' -o -name '*.hpp' 2>/dev/null)
# The contract seen as kakeya/wire/*.proto, so that the stubs import each other from there.
PROTOC  := $(BIN)/python -m grpc_tools.protoc -Ikakeya/wire=proto/kakeya/v1
PROTOS  := $(patsubst proto/kakeya/v1/%,kakeya/wire/%,$(wildcard proto/kakeya/v1/*.proto))
RUNTIME := $(VENV)/.installed-runtime
DEV     := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup chat test quick check format bench review proto docs clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

chat: $(RUNTIME) ## talk to the default model (MODEL=name, ARGS="--window 512 ...")
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	@$(BIN)/kakeya chat --model $(MODEL) $(ARGS)

test: $(DEV) ## run every test with branch coverage (ARGS="-k name" for some)
	@scripts/system_packages.sh
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	$(BIN)/python -m pytest --cov --cov-report= $(WORKERS) $(ARGS)
	@failed=0; \
	  echo "covered of the product, at least 99 %:"; \
	  $(BIN)/coverage report --omit='*/kakeya/bench/*' --fail-under=99 || failed=1; \
	  echo "covered of the benchmarks, at least 90 %:"; \
	  $(BIN)/coverage report --include='*/kakeya/bench/*' --fail-under=90 || failed=1; \
	  exit $$failed

quick: $(DEV) ## run the quick tests without coverage, up to the first failure (90 seconds at most)
	$(BIN)/python -m pytest -x -q -rfE -m "not slow and not gpu" $(WORKERS) $(QUICK) $(ARGS)

check: $(DEV) ## lint, format, types, import rules, names in the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-proto
	$(BIN)/python scripts/api_docs.py --check
	$(BIN)/python scripts/check_docs.py

format: $(DEV) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(DEV) ## generate the wire stubs from proto/
	$(PROTOC) --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS)

docs: $(BIN)/python ## write docs/api.md from the proto comments and the docstrings
	$(BIN)/python scripts/api_docs.py

# The committed stubs must be what the contract generates.
.PHONY: check-proto
check-proto: $(DEV)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	  $(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) && \
	  for stub in $$fresh/kakeya/wire/*; do \
	    cmp "$$stub" "src/kakeya/wire/$${stub##*/}" || { echo "stale stubs: run make proto" >&2; exit 1; }; \
	  done

bench: $(RUNTIME) ## measure the engine (ARGS="--peers" beside llama.cpp)
	@$(BIN)/kakeya bench engine --model $(MODEL) $(ARGS)

# Both run to their end, so that one failed gate does not hide the other's.
review: $(RUNTIME) ## five minutes of one conversation and a small ramp of agents; fails with their gates
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	@failed=0; \
	  $(BIN)/kakeya bench conversation --model $(MODEL) --duration-s 300 --output bench-review-conversation.json || failed=1; \
	  $(BIN)/kakeya bench capacity --model $(MODEL) --levels 1,8,32 --output bench-review-capacity.json || failed=1; \
	  exit $$failed

setup: $(DEV) ## make the virtual environment with everything in it

clean: ## remove what was built; the model cache stays
	rm -rf $(VENV) build dist src/*.egg-info .coverage .coverage.* htmlcov \
	  .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis \
	  tests/compat/node/node_modules
	find src -name '*.so' -delete

# A virtual environment is made once; a stamp newer than its inputs makes the next run instant.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(INPUTS) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(RUNTIME)
