# Two commands: `make train` and `make test`. Each sets up .venv when it is absent or older than what it is made from.
PYTHON ?= python3
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/installed
# Processes share the cores: one thread each, for two processes of two threads on two cores are many times slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help train test lint eval info clean
.SILENT:

help:
	echo 'make train   set up .venv and train VisionMamba2 on 4,000 MNIST digits (ARGS="key=value ..." overrides the config)'
	echo 'make test    set up .venv, check style, types and import rules, and run all tests (JOBS=2 processes)'
	echo 'make eval    evaluate the trained model that comes with the repository (ARGS as for train)'
	echo 'make info    which backend runs which operator on this machine, and why not the others'
	echo 'make lint    the style, type and import checks of make test alone'
	echo 'make clean   remove .venv and caches'
	echo 'PYTHON=python3.12 chooses the interpreter for .venv: 3.10, 3.11 or 3.12.'

train: $(INSTALLED)
	$(BIN)/python train.py $(ARGS)

eval: $(INSTALLED)
	$(BIN)/python eval.py $(ARGS)

info: $(INSTALLED)
	$(BIN)/python -m vmamba_npu.info $(ARGS)

test: lint
	echo '== pytest'
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(INSTALLED)
	echo '== ruff check'
	$(BIN)/ruff check .
	echo '== ruff format'
	$(BIN)/ruff format --check .
	echo '== import rules'
	$(BIN)/lint-imports
	echo '== codespell'
	$(BIN)/codespell
	echo '== mypy'
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info < (3, 13) or sys.exit("vmamba_npu needs Python 3.10, 3.11 or 3.12, but $(PYTHON) is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12 ...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || { \
	  echo 'Could not make .venv: this Python lacks its venv module (Debian and Ubuntu: apt install python3-venv).' >&2; exit 1; }
	echo 'Installing into .venv, once: several GB with PyTorch, some minutes.'
	$(BIN)/pip install --disable-pip-version-check --quiet -e '.[train,test]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist
