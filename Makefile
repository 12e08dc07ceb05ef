# make search: a virtual environment, the install, and a plan for GPT-2 on this machine
# make test:   the same environment, the linters and all the tests (what CI runs)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: search test quick lint types bench accuracy clean

search: $(VENV)/.installed
	$(BIN)/autoplan search --model gpt2

test: $(VENV)/.installed-test lint types
	$(BIN)/python -m pytest

quick: $(VENV)/.installed-test lint types
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
