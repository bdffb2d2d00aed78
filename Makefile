# On a fresh machine with Python 3.10+ and a C++ compiler, "make demo" and "make test" do all the rest.
PYTHON ?= python3
VENV ?= .venv
# PyPI's torch for Linux carries CUDA (several GB); name a CPU build here if pip finds one.
TORCH ?= torch==2.13.0
# What tests with PyTorch need besides: op_db imports expecttest. The networks of torchvision and timm are tested where
# a torchvision built for this torch is installed, which PyPI has for its CUDA build only.
TORCH_TESTS ?= expecttest==0.3.0 transformers==5.24.0
# Test processes: each takes up to 6 GiB on the largest models.
WORKERS ?= 2
# Extra arguments for pytest, as in: make test ARGS="tests/cli -x"
ARGS ?=

BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard tvm_fusion/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-full relay-env lint format clean

help:
	@echo "make demo       plan, compile, verify and time a real network on the CPU"
	@echo "make test       the tests that take minutes"
	@echo "make test-full  all tests: with PyTorch, every model, packaging in clean environments"
	@echo "make docs       the documentation site, in build/site; a warning is an error"
	@echo "make relay-env  an environment with a TVM that has Relay, for its tests (Python 3.10)"
	@echo "make lint       style of Python and C++, types of the public API;  make format repairs it"
	@echo "make clean      remove what the other targets made"

install: $(VENV)/installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# Redone only when what an editable install cannot pick up by itself has changed.
$(VENV)/installed: $(VENV)/bin/python setup.py pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[onnx,dev]"
	@touch $@

$(VENV)/installed-torch: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(TORCH_TESTS)
	@touch $@

# The extras of the documentation and the notebooks, which the fast tests do without.
$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[onnx,dev,docs,tutorials]"
	@touch $@

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: $(VENV)/installed
	$(BIN)/python benchmarks/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# Skipped, with the reason, where there is no Python 3.10 or the wheel cannot be had.
relay-env: $(VENV)/installed
	$(BIN)/python tvm_fusion/testing/relay_environment.py

test-full: $(VENV)/installed-torch $(VENV)/installed-docs relay-env
	$(BIN)/python -m pytest -n $(WORKERS) --slow $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror tvm_fusion/csrc/* examples/cpp/*.cc examples/cpp/*.h

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i tvm_fusion/csrc/* examples/cpp/*.cc examples/cpp/*.h

clean:
	rm -rf $(VENV) .venv-relay .demo build dist ./*.egg-info tvm_fusion/_core.so
