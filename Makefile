# Two commands matter: `make demo` and `make test`. Both work in a fresh clone; they make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Clients that other people wrote, in versions of their own.
CLIENTS := .venv-clients
PROGRAMS := bench/client_programs
# Compiled when Quire is installed.
NATIVE := $(wildcard src/quire/kernels/cpu/*)
# One thread per test process: the models are tiny. Three processes share two cores: one often waits for a server, a child or a
# file. Tests of a file run in one of them, so that what they share is made once, but for those that an idle one takes over.
WORKERS ?= 3
export TOKENIZERS_PARALLELISM := false
# Byte code is kept: many tests start processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# On a terminal pip shows what it downloads, which takes minutes; elsewhere a line says what happens.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(shell test -t 2 || echo -q)

# What measures and tests a GPU works offline, with the Python that has PyTorch for it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# PyTorch for CPUs brings no Triton, whose kernels are tested by its interpreter; PyTorch for CUDA brings its own.
TRITON := triton==3.6.0

.PHONY: demo test test-all test-real test-clients mutants mutants-cpp lint format bench gpu-test gpu-bench screenshots clean help

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.stamp-run  ## Complete, fork, rewind, save and restore with the bundled model
	@$(BIN)/python examples/demo.py

test: $(VENV)/.stamp-test  ## The tests that continuous integration runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-all: $(VENV)/.stamp-test  ## All tests, also the long ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --timeout 3600 --hypothesis-profile random

test-real: $(VENV)/.stamp-test  ## Real models in DIR, downloaded if there are none; the chat page with the model CHAT (takes minutes)
	$(BIN)/python -m tests.real.fetch $(DIR)
	QUIRE_REAL_MODELS=$(DIR) $(BIN)/python -m pytest -m real tests/real
	$(if $(CHAT),QUIRE_CHAT_MODEL=$(CHAT) $(BIN)/python -m pytest tests/inspector/test_chat.py)

test-clients: $(VENV)/.stamp-test $(CLIENTS)/.stamp $(PROGRAMS)/node_modules/.stamp  ## Clients of others, Python and npm, against the server (installs 2 GB; 10 minutes)
	$(BIN)/python bench/clients.py --python $(CLIENTS)/bin/python
	$(BIN)/python bench/fuzz.py --python $(CLIENTS)/bin/python --cases 2000 --seconds 120

mutants: $(VENV)/.stamp-test  ## Plant faults in copies of the code; the tests must find each of them
	$(BIN)/python -m tests.mutants

mutants-cpp: $(VENV)/.stamp-test  ## Plant faults in the C++ kernels; the tests must find each of them
	$(BIN)/python -m tests.mutants.native_faults --objects build/mutants

lint: $(VENV)/.stamp-test  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-test  ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-test  ## Benchmarks beside transformers, and LLAMA=PYTHON, VLLM=PYTHON (takes hours, and 12 GB of disk)
	$(BIN)/quire bench peers --dtypes bfloat16,float32,int8,int4 $(if $(LLAMA),--llama $(LLAMA)) $(if $(VLLM),--vllm $(VLLM))
	$(BIN)/python bench/state.py
	$(BIN)/python bench/throughput.py
	$(BIN)/python bench/overheads.py
	$(BIN)/python bench/bare_steps.py
	$(BIN)/python bench/inspector.py
	$(BIN)/python bench/windows.py
	$(BIN)/python bench/recurrence.py
	$(BIN)/python bench/attention.py
	$(BIN)/python bench/linear.py
	$(BIN)/python bench/blocks.py
	$(BIN)/python bench/mixers.py
	$(BIN)/python bench/experts.py
	$(BIN)/python bench/hybrids.py
	$(BIN)/python bench/quantisation.py
	$(BIN)/python bench/states.py
	$(BIN)/python bench/latent.py
	$(BIN)/python bench/blend_quality.py
	$(BIN)/python bench/blend_quality.py --text --prompts 60
	$(BIN)/python bench/adapters.py --peer peft
	$(BIN)/python bench/serve.py
	$(BIN)/python bench/soak.py

screenshots: $(VENV)/.stamp-test  ## Pictures of the inspector, notebooks and terminals in docs/images (needs chromium; 3 minutes)
	$(BIN)/python bench/screenshots.py

gpu-test:  ## Tests on a CUDA device, with GPU_PYTHON, offline; nothing without a device
	PYTHONPATH=src:bench:. $(GPU_PYTHON) -m tests.gpu_suite

gpu-bench:  ## Benchmarks on a CUDA device, with GPU_PYTHON, offline
	PYTHONPATH=src $(GPU_PYTHON) bench/gpu.py

clean:  ## Remove what make made
	rm -rf $(VENV) $(CLIENTS) $(PROGRAMS)/node_modules build dist src/quire.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-run: pyproject.toml setup.py constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo "Installing Quire and what it needs, PyTorch among it, into $(VENV): once, some minutes"
	@$(PIP) -e '.[server]'
	@touch $@

$(VENV)/.stamp-test: pyproject.toml setup.py constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo "Installing Quire and what its tests need, PyTorch among it, into $(VENV): once, some minutes"
	@$(PIP) -e '.[server,test,browser,lint]'
	@test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) --no-deps $(TRITON)
	@touch $@ $(VENV)/.stamp-run

$(CLIENTS)/.stamp: $(PROGRAMS)/requirements.txt
	@echo "Installing clients of others into $(CLIENTS): once, some minutes"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r $<
	@touch $@

# Without Node the table says that its clients were not run.
$(PROGRAMS)/node_modules/.stamp: $(PROGRAMS)/package.json $(PROGRAMS)/package-lock.json
	@if command -v npm > /dev/null; then cd $(PROGRAMS) && npm ci --no-audit --no-fund --silent; else mkdir -p $(PROGRAMS)/node_modules; fi
	@touch $@
