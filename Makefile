# Two commands, each complete from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-plain lint docs bench clean

demo: $(VENV)/.demo-ready
	$(BIN)/advbayes demo

test: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

# The definitions alone, without what makes them fast.
test-plain: $(VENV)/.test-ready
	ADVBAYES_ACCELERATED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/test_identities_*.py \
		tests/test_predictor_contract.py tests/test_training.py

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test-ready
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

bench: $(VENV)/.test-ready
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/purification.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cli,data,report]'
	touch $@

$(VENV)/.test-ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all]'
	touch $@ $(VENV)/.demo-ready

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build
