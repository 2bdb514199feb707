# Everything here works on a machine that has python3, pip and make; `make help` lists it.

PYTHON ?= python3
# The tests of a file share compiled programs: a process for each core, up to 8, and each file
# in one of them, by name: by number of tests, one of the longest would be last.
PYTEST_FLAGS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# float64 is the default; implicit promotion of dtypes or ranks is an error, and so is a NaN that
# the test does not make. Tests that depend on none of these, or set them themselves, are marked x32.
X64 := JAX_ENABLE_X64=1 JAX_NUMPY_DTYPE_PROMOTION=strict JAX_NUMPY_RANK_PROMOTION=raise \
	JAX_DEBUG_NANS=1
X64_TESTS := -m "not peers and not long and not x32" tests/strategies tests/layers \
	tests/operation/test_activations.py
TO := $(if $(OUT),--out $(OUT))
GPU_ENVIRONMENT := $(if $(filter none,$(ENVIRONMENT)),,.venv-gpu)
GPU_PYTHON := $(if $(GPU_ENVIRONMENT),$(GPU_ENVIRONMENT)/bin/python,$(PYTHON))
# Code in documents and notebooks is as wide as the site shows it: scripts/site.py.
DOCUMENTS := --line-length 84 $(wildcard *.md */*.md docs/*/*.md notebooks/*.ipynb)

.PHONY: always help setup stability accuracy benchmark experiments gpu-compile-check \
	tpu-compile-check gpu test test-long fuzz test-peers test-newest linters lint format docs \
	docs-serve notebooks dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
	@echo 'PYTHON=python3.12   with any of them: the Python to make environments with'
	@echo 'OUT=experiments     with those for a GPU or a TPU: replace committed results'
	@echo 'ENVIRONMENT=none    with make gpu: install nothing, take the packages that PYTHON has'

# The environments that the script lists: .venv, .venv-peers and others.
.ven%: always
	@"$(PYTHON)" scripts/environment.py $@

setup: .venv ## make .venv with everything but the linters and the peers

stability: .venv ## the main job: Equinox issue #659 on MNIST, figures and tables
	.venv/bin/python -m experiments.stability

accuracy: .venv-peers ## errors of this layer, Equinox, Flax and PyTorch in the hard cases
	.venv-peers/bin/python -m experiments.accuracy

benchmark: .venv-peers ## speed beside Equinox, Flax and PyTorch: figure, tables, goals
	.venv-peers/bin/python -m experiments.speed

experiments: .venv-peers ## replace every committed table and figure (95 minutes)
	for experiment in stability "stability --network large" variance_clipping \
		small_batches state_consistency accuracy determinism speed; do \
		.venv-peers/bin/python -m experiments.$$experiment --out experiments || exit 1; \
	done
	$(MAKE) --no-print-directory gpu-compile-check tpu-compile-check OUT=experiments
	.venv-peers/bin/python -m experiments

# With the newest jax, which needs Python 3.12: where there is none, the script says so, and nothing
# is ready.
gpu-compile-check tpu-compile-check: %-compile-check: .venv-compile
	@! test -e $</ready || $</bin/python -m experiments.compiled --target $* $(TO)
	@test $* = tpu || ! test -e $</ready || $</bin/python -m tests.operation.kernels.ptx
gpu-compile-check: ## compile for GPUs, none needed: what programs move, kernels (2 GB)
tpu-compile-check: ## compile for TPUs, none needed: what programs move

# Each exits with 1 if a claim does not hold. The second runs in any case.
gpu: nvidia-smi $(GPU_ENVIRONMENT) ## measure on a CUDA GPU: errors, time beside Flax and PyTorch (7 GB)
	status=0; \
	$(GPU_PYTHON) -m experiments.accuracy $(TO) || status=1; \
	$(GPU_PYTHON) -m experiments.speed --device gpu $(TO) || status=1; \
	exit $$status

nvidia-smi:
	@command -v $@ >/dev/null || { echo "there is no GPU to measure here (no $@)" >&2; exit 2; }

test: .venv ## all tests but those below
	.venv/bin/python -m pytest $(PYTEST_FLAGS)

test-long: .venv ## experiments with --quick, notebooks, documents; layers in 64 bits; a fuzzer
	.venv/bin/python -m pytest -n 2 -m long
	$(X64) .venv/bin/python -m pytest $(PYTEST_FLAGS) $(X64_TESTS)
	$(MAKE) --no-print-directory fuzz SEED=0 CASES=50

fuzz: .venv ## random uses of the layers beside formulas: make fuzz SEED=0 CASES=200
	.venv/bin/python -m tests.fuzz --seed $(or $(SEED),0) --cases $(or $(CASES),200)

test-peers: .venv-peers ## compare with PyTorch and Flax, live
	.venv-peers/bin/python -m pytest -m peers

test-newest: .venv-newest ## the tests on Python 3.12 or later with the newest jax
	@! test -e $</ready || $</bin/python -m pytest $(PYTEST_FLAGS) --ignore tests/experiments

linters: .venv
	@test -e .venv/linters || { .venv/bin/python -m pip install --no-compile --editable ".[lint]" \
		--constraint "$$(cat .venv/constraints)" && touch .venv/linters; }

lint: linters ## ruff and pyright
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/ruff format --check $(DOCUMENTS)
	.venv/bin/pyright

format: linters ## let ruff put the sources in order
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/ruff format $(DOCUMENTS)

docs: .venv-docs ## build the site into build/site
	.venv-docs/bin/mkdocs build --strict --site-dir build/site

docs-serve: .venv-docs ## show the site at a local address, and changes to it
	.venv-docs/bin/mkdocs serve

notebooks: .venv-docs ## run the notebooks, and write their outputs into them
	.venv-docs/bin/python scripts/notebooks.py

dist: linters ## build the wheel and the sdist into dist, and check them
	rm -rf dist
	.venv/bin/python -m hatchling build --directory dist
	.venv/bin/twine check --strict dist/*

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis .mypy_cache
	find eqx_norm strategies experiments tests scripts -name __pycache__ -prune -exec rm -rf {} +
