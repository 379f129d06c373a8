# make serve   install into .venv, start the server, stream one answer, serve until Ctrl-C
# make demo    the same, but stop after the answer
# make test    the gate: lint, format, types, all tests
# make native  build the native library into src/blink/lib, warnings being errors
# make clean   remove all that was built (make distclean: .venv too)
#
# Variables: PYTHON (3.10 or newer), MODEL (directory or .gguf), PROMPT, ARGS (more flags of `blink serve`).

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?= In one sentence: what is a language model?
ARGS ?=
# Where the CPU build of torch is taken from when pip's own configuration offers none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
CMAKE = $(or $(shell command -v cmake),$(BIN)/cmake)
NATIVE_SOURCES := CMakeLists.txt $(wildcard src/blink/csrc/*/*)

MAKEFLAGS += --no-print-directory

.DELETE_ON_ERROR:
.PHONY: serve demo test native clean distclean

serve: $(VENV)/.engine
	@exec $(BIN)/blink serve $(MODEL) --sample-prompt "$(PROMPT)" $(ARGS)

demo: $(VENV)/.engine
	@exec $(BIN)/blink serve $(MODEL) --sample-prompt "$(PROMPT)" --exit-after-sample $(ARGS)

test: $(VENV)/.dev native
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -c "from blink.models.weights.files import resolve_model; print('default model:', resolve_model('').name)"
	$(BIN)/python -m pytest

native: $(VENV)/.tools
	$(CMAKE) -S . -B build/native -DBLINK_WERROR=ON --log-level=WARNING
	$(CMAKE) --build build/native

clean:
	rm -rf build dist src/blink/lib .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# The build tools, all from PyPI: only a C++ compiler must be there.
$(VENV)/.tools:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Blink needs Python 3.10 or newer')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'scikit-build-core>=0.11' cmake ninja
	touch $@

# The CPU build of torch is ten times smaller than the default one: first from where pip is configured
# to look, then from PyTorch's own index; failing both, whatever pip finds.
$(VENV)/.torch: constraints.txt | $(VENV)/.tools
	$(PIP) install '$(TORCH)+cpu' 2>/dev/null \
	  || $(PIP) install --retries 1 --timeout 20 --extra-index-url $(TORCH_INDEX) '$(TORCH)+cpu' \
	  || $(PIP) install '$(TORCH)'
	touch $@

$(VENV)/.engine: pyproject.toml $(NATIVE_SOURCES) $(VENV)/.torch
	$(PIP_INSTALL) --quiet --no-build-isolation --editable '.[engine]'
	touch $@

$(VENV)/.dev: $(VENV)/.engine
	$(PIP_INSTALL) --quiet --no-build-isolation --editable '.[engine,dev]'
	touch $@
