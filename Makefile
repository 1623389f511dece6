# The project's verbs. Each sets up what it needs; CI calls the same ones (.ci/run).
#
#   make setup       .venv with everything, pinned by constraints.txt
#   make test        pytest                     make test ARGS="-k layout"
#   make lint        ruff and the import tower
#   make typecheck   mypy, strict
#   make bench       store benchmarks           make bench ARGS=--quick
#   make docs        regenerate the tables of store/FORMAT.md and connector/README.md

PYTHON ?= python3
ARGS   ?=
BIN    := .venv/bin
STAMP  := .venv/.installed

.DEFAULT_GOAL := test
.PHONY: setup test lint typecheck bench docs clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 setup' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy python3-venv; } \
	  || { echo 'python3 -m venv does not work here. Install it (Debian: apt-get install python3-venv), then run make again.' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The constraints are given through the environment so that they also hold where pip builds a package.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(BIN)/python -m pip install --quiet --no-input --editable '.[dev,compression]'
	@touch $@

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks store $(ARGS)

# runpy warns that the package has imported the module before it runs it; here that does no harm.
docs: setup
	$(BIN)/python -W ignore::RuntimeWarning:runpy -m messagestore.layout store/FORMAT.md
	$(BIN)/python -m pyspark_messagestore.options connector/README.md

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
