# Everything runs in an environment outside the clone (scripts/setup.sh), made at the first call.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

HOST ?= 127.0.0.1
PORT ?= 30000
MODEL ?= demo/model
ARGS ?=

export PYTHON
VENV := $(shell scripts/setup.sh path)
export PATH := $(CURDIR)/build/site/bin:$(VENV)/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/build/site
export SGLANG_FT_KERNEL_DIR := $(CURDIR)/build/sgl-ft-kernel
# Where there is a GPU, what is started has the CUDA kernels.
KERNEL = $(if $(wildcard /dev/nvidia0 /dev/dxg),kernel)
CPP = $(shell find cpu_worker sgl-ft-kernel/csrc sgl-ft-kernel/include -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PYTEST = HF_HUB_OFFLINE=1 pytest

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  settings: PORT=$(PORT) HOST=$(HOST) MODEL=$(MODEL) ARGS='more server flags' PYTHON=python3.12"

# -- use

# $(call build,FOLDER,DEFINITIONS) builds FOLDER into build/FOLDER.
define build
	cmake -S $(1) -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=Release $(2) >build/$(1).log 2>&1 \
	  || { cat build/$(1).log; exit 1; }
	cmake --build build/$(1)
endef

.PHONY: serve
serve: site $(KERNEL) ## serve the demo model on HOST:PORT, no GPU needed
	exec python -m sglang_ft.launch_server --model-path $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

.PHONY: doctor
doctor: site $(KERNEL) ## check this machine: each problem with its cure
	sglang-ft doctor

# -- test

.PHONY: test
test: lint types ctest tiny unit server ## everything below that needs no GPU

.PHONY: lint
lint: venv ## ruff and clang-format, changing nothing
	ruff check .
	ruff format --check .
	$(if $(CPP),clang-format --dry-run --Werror $(CPP))

.PHONY: types
types: site ## mypy
	mypy

.PHONY: ctest
ctest: site ## tests of the C++ worker and of the cache's plan; compiles the CUDA kernels
	$(call build,cpu_worker)
	$(call build,sgl-ft-kernel)
	ctest --test-dir build/cpu_worker --output-on-failure
	ctest --test-dir build/sgl-ft-kernel --output-on-failure

.PHONY: tiny
tiny: site ## a tour of the project in under a minute
	$(PYTEST) test/tiny

.PHONY: unit
unit: site ## tests without a server
	$(PYTEST) test/unit

.PHONY: server
server: site ## tests with real servers and real clients
	$(PYTEST) test/server

.PHONY: gpu
gpu: site kernel ## tests that need CUDA
	$(PYTEST) test/gpu

# -- develop

.PHONY: kernel
kernel: venv ## the CUDA kernels, about a minute
	$(call build,sgl-ft-kernel,-DFT_REQUIRE_CUDA=ON)

.PHONY: format
format: venv ## ruff and clang-format, in place
	ruff check --fix .
	ruff format .
	$(if $(CPP),clang-format -i $(CPP))

.PHONY: bench
bench: site ## cpu_worker against a plain read of the same memory; writes benchmark/results/
	python benchmark/cpu_experts.py $(ARGS)

.PHONY: docs
docs: site ## write docs/cli.md anew
	python -m sglang_ft.cli.docs docs/cli.md

.PHONY: lock
lock: venv ## write the lock files anew with the newest versions allowed
	scripts/lock.sh

.PHONY: wheel
wheel: venv ## build dist/sglang_ft-*.whl and the source archive
	python -m build --no-isolation --outdir dist .

.PHONY: clean
clean: ## remove what was built here; the environment outside stays
	rm -rf build dist

# -- prepare

.PHONY: venv site
venv: ## the environment with the locked packages
	@mkdir -p build
	@scripts/setup.sh venv

site: ## build/site: this clone's wheel, unpacked
	@scripts/setup.sh site
