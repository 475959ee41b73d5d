# Every target first installs what it needs, once. POSIX sh, GNU or BSD-compatible make.
#
#   make quickstart   text → model → chat, then a report          make laws      measure the laws, write docs/laws.md
#   make rl           practise counting and spelling, after the quickstart
#   make test         the whole suite                             make bench     throughput of every stage
#   make check        lint, types of what changed, import layers  make campaign  the slow, many-trial tests
#   make clean        remove caches and .venv, keep out/
#
# Variables:  PYTHON  the interpreter that makes .venv (3.11 or newer)
#             TORCH   the torch version to install; a torch already in .venv is kept
#             TRITON  the triton version for the tests' interpreter; one that came with torch's CUDA build is kept
#             JOBS    number of test processes, of one thread each, and of pyright's threads
#             TESTS   what `make test` runs, for example TESTS=tests/text

PYTHON ?= python3
TORCH ?= 2.13.0
TRITON ?= 3.6.0
JOBS ?= 2
TESTS ?= tests

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
TYPED := .pytest_cache/typed
# pip would compile every module that it installs, which takes half of its time, and most are never imported. Python
# compiles a module at its first import and keeps the result, unless PYTHONDONTWRITEBYTECODE is set. So the recipes empty
# that variable, and the setup imports once what every command needs.
INSTALL := $(BIN)/python -m pip install --no-compile
COMPILED := PYTHONDONTWRITEBYTECODE=
PYTEST := $(COMPILED) $(BIN)/python -m pytest
# A file, or a group of files that share a server process, runs in one worker; tests/conftest.py puts the slowest first.
PARALLEL := -n $(JOBS) --dist loadgroup --no-loadscope-reorder
LAWS := out/laws.xml

.PHONY: help setup quickstart rl test check types changed-types lint layers laws bench campaign clean

help:
	@sed -n -e '/^$$/q' -e 's/^# \{0,1\}//p' Makefile

setup: $(DEV)

# Install torch first, by exact version: with a range, pip could replace a local CPU build by the newest CUDA build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "quern needs Python 3.11 or newer; name one: make PYTHON=python3.12 quickstart"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
		$(INSTALL) "torch==$(TORCH)"
	$(INSTALL) -c constraints.txt -e ".[serve]"
	@$(COMPILED) $(BIN)/python -c 'import quern.stages.run_all'
	@touch $@

# The extra packages of tests and checks. The triton version is fixed because pyright reads its annotations.
$(DEV): $(STAMP)
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(sys.platform == "linux" and u.find_spec("triton") is None)' || \
		$(INSTALL) "triton==$(TRITON)"
	$(INSTALL) -c constraints.txt -e ".[dev,serve]"
	@touch $@

# Rates by the square root of the batch, as nanochat's: with the default's cube root the bits per byte are lower, and one
# seed of five had not learned multiple choice after 500 steps (docs/scaling.md#where-the-defaults-come-from).
quickstart: $(STAMP)
	$(COMPILED) $(BIN)/quern run --run quickstart --train.minutes 4.2 --optim.batch-exponent 0.5 --text.val-megabytes 0.1
	@echo
	@echo "The report:         out/runs/quickstart/report.html"
	@echo "Talk to the model:  $(BIN)/quern chat quickstart"
	@echo "Serve it:           $(BIN)/quern serve quickstart"
	@echo "Your own text:      $(BIN)/quern run --data path/to/texts --run mine"
	@echo "A larger model:     $(BIN)/quern run --depth 8 --run larger"

rl: $(STAMP)
	$(BIN)/quern rl --run quickstart --rl.rewards counting spelling --rl.steps 30
	$(BIN)/quern evaluate --run quickstart --stage rl

test: $(DEV)
	$(PYTEST) $(PARALLEL) --durations=15 $(TESTS)

# In parallel, because pyright uses one core when it starts. The make of macOS (3.81) has no --output-sync.
check: $(DEV)
	@$(MAKE) --no-print-directory $(patsubst %,--%,$(filter output-sync,$(.FEATURES))) --jobs 2 changed-types lint layers

types: $(DEV)
	$(BIN)/pyright --threads $(JOBS)

# In a clean clone these are all files.
changed-types: $(DEV)
	@mkdir -p $(dir $(TYPED)) && touch $(TYPED).new
	@files=$$($(BIN)/python tests/changed.py $(TYPED)); case $$files in \
		all) $(MAKE) --no-print-directory types;; \
		none) echo "nothing has changed since the last check of types";; \
		*) echo "pyright reads what changed, and what imports it: make types reads all"; $(BIN)/pyright $$files;; \
	esac
	@mv $(TYPED).new $(TYPED)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layers: $(DEV)
	$(PYTEST) -q tests/test_layers.py

laws: $(DEV)
	$(PYTEST) $(PARALLEL) --junitxml $(LAWS) tests/laws
	$(BIN)/python tests/laws/table.py $(LAWS) README.md docs/laws.md

bench: $(STAMP)
	$(BIN)/quern bench

campaign: $(DEV)
	$(PYTEST) $(PARALLEL) -m campaign --timeout 0 --durations=15 $(TESTS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find quern tests experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
