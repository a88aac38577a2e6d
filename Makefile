# `make demo` and `make test` are complete on a fresh machine: each makes its own virtual environment.
# PYTHON picks the interpreter (3.10 to 3.13); PIP_ARGS is passed to pip, for instance the index of PyTorch's CPU builds.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test docs lint clean

demo: $(VENV)/.demo
	$(BIN)/python -m spec_ops generate --compare

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/interpreter

# The site, in site/; Python 3.11 or newer. `make test` builds it too, and looks at it in Chromium where that is installed.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing spec-ops and its dependencies into $(VENV) (a few minutes the first time)"
	$(INSTALL) torch
	$(INSTALL) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --editable ".[test,docs]"
	touch $@
