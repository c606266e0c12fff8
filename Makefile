# `make demo` and `make test` do their whole set-up in .venv. Needs Python 3.11 or 3.12.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs notebooks

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

# API pages from the docstrings, in build/docs.
docs: .venv/installed
	$(BIN)/python -m pdoc zero_fn '!zero_fn.__main__' --docformat google -o build/docs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch .venv/installed
