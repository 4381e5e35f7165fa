VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: demo test lint bench install clean

demo: install  ## set up and run a small hyperparameter search from end to end
	rm -rf runs/demo
	$(BIN)/dask-mohpo run --study examples/demo.yaml

test: install  ## set up and run all tests
	$(BIN)/python -m pytest

lint: install  ## the checks that CI makes before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## measure everything that benchmarks/results.md holds; takes hours, wants a quiet machine
	$(BIN)/python benchmarks/run_all.py

install: $(VENV)/.installed  ## the package and its development tools, in $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
