# `make demo` and `make test` do their whole set-up in .venv. Needs Python 3.11 or 3.12.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint notebooks

demo: .venv/installed
	$(BIN)/python -m zero_fn demo

test: lint
	$(BIN)/python -m pytest -n 2

notebooks: .venv/installed
	$(BIN)/python -m notebooks.build

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy zero_fn kernels

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch .venv/installed
