# Everything here works on a machine that has python3, pip and make; `make help` lists it.

PYTHON ?= python3
# Tests are many small compilations, of which those of a file share some: two processes, whatever
# the number of cores, and each file in one of them.
PYTEST_FLAGS ?= -n 2 --dist loadfile
# With float64 as the default, and without implicit promotion, which then is an error. What
# depends on neither, or says so itself, is marked x32: this run takes a minute of one core.
X64 := JAX_ENABLE_X64=1 JAX_NUMPY_DTYPE_PROMOTION=strict
X64_TESTS := -m "not peers and not long and not x32" tests/strategies tests/layers \
	tests/operation/test_activations.py
VENV := .venv
PEERS := .venv-peers
NEWEST := .venv-newest
GPU_COMPILE := .venv-gpu-compile
GPU := .venv-gpu
SOURCES := eqx_norm strategies experiments tests

.PHONY: help setup stability accuracy benchmark experiments gpu-compile-check gpu \
	test test-long test-peers test-newest lint format clean another-python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
	@echo 'PYTHON=python3.12   with any of them: the Python to make environments with'
	@echo 'OUT=experiments     with those that have gpu in their names: replace committed results'

setup: $(VENV)/ready ## make .venv with everything but the linters and the peers

stability: $(VENV)/ready ## the main job: Equinox issue #659 on MNIST, figures and tables
	$(VENV)/bin/python -m experiments.stability

accuracy: $(PEERS)/ready ## errors of this layer, Equinox, Flax and PyTorch in the hard cases
	$(PEERS)/bin/python -m experiments.accuracy

benchmark: $(PEERS)/ready ## speed beside Equinox, Flax and PyTorch: figure, tables, goals
	$(PEERS)/bin/python -m experiments.speed

experiments: $(PEERS)/ready ## replace every committed table and figure (35 minutes)
	for experiment in stability "stability --network large" variance_clipping \
		small_batches state_consistency layer_norm accuracy determinism distributed speed; do \
		$(PEERS)/bin/python -m experiments.$$experiment --out experiments || exit 1; \
	done
	$(MAKE) --no-print-directory gpu-compile-check OUT=experiments
	$(PEERS)/bin/python -m experiments

# Like the newest jax, jax's CUDA plugin needs a newer Python.
gpu-compile-check: ## compile for GPUs, none needed: what programs move (1.3 GB)
	@if python=$$(sh scripts/newer-python.sh 3.12); then \
		$(MAKE) --no-print-directory $(GPU_COMPILE)/ready NEWER_PYTHON="$$python" && \
		$(GPU_COMPILE)/bin/python -m experiments.compiled $(if $(OUT),--out $(OUT)); \
	else \
		echo "gpu-compile-check: no Python 3.12 or later was found here; nothing compiled"; \
	fi

# Either exits with 1 where a claim does not hold: the other is to be measured all the same.
gpu: ## measure on a CUDA GPU: errors, time beside Flax and PyTorch (7 GB)
	@if python=$$(sh scripts/newer-python.sh 3.12); then \
		$(MAKE) --no-print-directory $(GPU)/ready NEWER_PYTHON="$$python" || exit 1; \
		failed=0; \
		$(GPU)/bin/python -m experiments.accuracy $(if $(OUT),--out $(OUT)) || failed=1; \
		$(GPU)/bin/python -m experiments.speed --device gpu $(if $(OUT),--out $(OUT)) || failed=1; \
		exit $$failed; \
	else \
		echo "gpu: no Python 3.12 or later was found here; nothing measured"; \
	fi

test: $(VENV)/ready ## all tests but those below; those of the layers again in 64 bits
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)
	$(X64) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(X64_TESTS)

test-long: $(VENV)/ready ## experiments with --quick, notebooks, documents, the slowest tests
	$(VENV)/bin/python -m pytest -n 2 -m long

test-peers: $(PEERS)/ready ## compare with PyTorch and Flax, live
	$(PEERS)/bin/python -m pytest -m peers

# The newest jax needs a newer Python than eqx-norm does; without one there is nothing to test.
test-newest: ## the tests on Python 3.12 or later with the newest jax
	@if python=$$(sh scripts/newer-python.sh 3.12); then \
		$(MAKE) --no-print-directory $(NEWEST)/ready NEWER_PYTHON="$$python" && \
		$(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS); \
	else \
		echo "test-newest: no Python 3.12 or later was found here; nothing tested"; \
	fi

lint: $(VENV)/linters-ready ## ruff and pyright
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

format: $(VENV)/linters-ready ## let ruff put the sources in order
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean: ## remove environments, builds and caches
	rm -rf $(VENV) $(PEERS) $(NEWEST) $(GPU_COMPILE) $(GPU) build dist .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Where PYTHON is said, environments of another Python are made anew. Where it is not, any serves.
ifneq ($(origin PYTHON),file)
another = $(shell sh scripts/same-python.sh "$(PYTHON)" $(1) || echo another-python)
$(VENV)/ready: $(call another,$(VENV))
$(PEERS)/ready: $(call another,$(PEERS))
endif

$(VENV)/ready: pyproject.toml constraints.txt scripts/environment.sh
	@sh scripts/environment.sh "$(PYTHON)" $(VENV) dev constraints.txt

$(VENV)/linters-ready: $(VENV)/ready
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt --editable ".[lint]"
	@touch $@

$(PEERS)/ready: pyproject.toml constraints.txt scripts/environment.sh
	@sh scripts/environment.sh "$(PYTHON)" $(PEERS) dev,peers constraints.txt
# Of its many dependencies its ResNet needs none.
	@$(PEERS)/bin/python -m pip install --disable-pip-version-check --no-deps \
		--constraint constraints.txt jaxonmodels || { rm $@; exit 1; }

$(NEWEST)/ready: pyproject.toml constraints-newest.txt scripts/environment.sh
	@sh scripts/environment.sh "$(NEWER_PYTHON)" $(NEWEST) dev constraints-newest.txt

$(GPU_COMPILE)/ready: pyproject.toml constraints-gpu-compile.txt scripts/environment.sh \
		scripts/gpu-compile-environment.sh
	@sh scripts/gpu-compile-environment.sh "$(NEWER_PYTHON)" $(GPU_COMPILE) \
		constraints-gpu-compile.txt

$(GPU)/ready: pyproject.toml constraints-gpu.txt scripts/environment.sh scripts/gpu-environment.sh
	@sh scripts/gpu-environment.sh "$(NEWER_PYTHON)" $(GPU) constraints-gpu.txt
