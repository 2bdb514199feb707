# Everything here works on a machine that has python3, pip and make; `make help` lists it.

# The tests of a file share compiled programs: two processes on any number of cores, and each file
# in one of them.
PYTEST_FLAGS ?= -n 2 --dist loadfile
# float64 is the default, and implicit promotion an error. Tests that depend on neither, or set
# both themselves, are marked x32.
X64 := JAX_ENABLE_X64=1 JAX_NUMPY_DTYPE_PROMOTION=strict
X64_TESTS := -m "not peers and not long and not x32" tests/strategies tests/layers \
	tests/operation/test_activations.py
VENV := .venv
PEERS := .venv-peers
NEWEST := .venv-newest
DOCS := .venv-docs
GPU_COMPILE := .venv-gpu-compile
TPU_COMPILE := .venv-tpu-compile
GPU := .venv-gpu
ENVIRONMENTS := $(VENV) $(PEERS) $(NEWEST) $(DOCS) $(GPU_COMPILE) $(TPU_COMPILE) $(GPU)
SOURCES := eqx_norm strategies experiments tests scripts
SCHEMA := $(VENV)/bin/check-jsonschema --default-filetype yaml --builtin-schema vendor
TO := $(if $(OUT),--out $(OUT))

.PHONY: $(ENVIRONMENTS) help setup stability accuracy benchmark experiments gpu-compile-check \
	tpu-compile-check gpu test test-long test-peers test-newest lint linters schemas format docs \
	docs-serve notebooks dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
	@echo 'PYTHON=python3.12   with any of them: the Python to make environments with'
	@echo 'OUT=experiments     with those for a GPU or a TPU: replace committed results'

# Environments are targets, too. The script makes those that are not ready, with PYTHON.
$(ENVIRONMENTS):
	@sh scripts/environment.sh $@

setup: $(VENV) ## make .venv with everything but the linters and the peers

stability: $(VENV) ## the main job: Equinox issue #659 on MNIST, figures and tables
	$(VENV)/bin/python -m experiments.stability

accuracy: $(PEERS) ## errors of this layer, Equinox, Flax and PyTorch in the hard cases
	$(PEERS)/bin/python -m experiments.accuracy

benchmark: $(PEERS) ## speed beside Equinox, Flax and PyTorch: figure, tables, goals
	$(PEERS)/bin/python -m experiments.speed

experiments: $(PEERS) ## replace every committed table and figure (35 minutes)
	for experiment in stability "stability --network large" variance_clipping \
		small_batches state_consistency layer_norm accuracy determinism distributed speed; do \
		$(PEERS)/bin/python -m experiments.$$experiment --out experiments || exit 1; \
	done
	$(MAKE) --no-print-directory gpu-compile-check tpu-compile-check OUT=experiments
	$(PEERS)/bin/python -m experiments

# jax's CUDA plugin, libtpu of that version, and the newest jax need Python 3.12. Where there is none,
# the script says so, and no environment is ready.
gpu-compile-check: $(GPU_COMPILE) ## compile for GPUs, none needed: what programs move (1.3 GB)
	@! test -e $(GPU_COMPILE)/ready || \
		$(GPU_COMPILE)/bin/python -m experiments.compiled --target gpu $(TO)

tpu-compile-check: $(TPU_COMPILE) ## compile for TPUs, none needed: what programs move (1.4 GB)
	@! test -e $(TPU_COMPILE)/ready || \
		$(TPU_COMPILE)/bin/python -m experiments.compiled --target tpu $(TO)

# Each exits with 1 if a claim does not hold. The second runs in any case.
gpu: ## measure on a CUDA GPU: errors, time beside Flax and PyTorch (7 GB)
	@command -v nvidia-smi >/dev/null || { \
		echo "make gpu measures a GPU, and there is none here (no nvidia-smi)" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(GPU)
	@! test -e $(GPU)/ready || { failed=0; \
		$(GPU)/bin/python -m experiments.accuracy $(TO) || failed=1; \
		$(GPU)/bin/python -m experiments.speed --device gpu $(TO) || failed=1; \
		exit $$failed; }

test: $(VENV) ## all tests but those below
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

test-long: $(VENV) ## experiments with --quick, notebooks, documents; layers again in 64 bits
	$(VENV)/bin/python -m pytest -n 2 -m long
	$(X64) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(X64_TESTS)

test-peers: $(PEERS) ## compare with PyTorch and Flax, live
	$(PEERS)/bin/python -m pytest -m peers

# Leaves out what does not depend on the version of jax.
test-newest: $(NEWEST) ## the tests on Python 3.12 or later with the newest jax
	@! test -e $(NEWEST)/ready || $(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS) \
		--ignore tests/experiments --ignore-glob '*/test_setup.py' --ignore-glob '*/test_wheel.py' \
		--ignore-glob '*/test_architecture.py'

linters: $(VENV)
	@sh scripts/environment.sh $(VENV) lint

lint: linters schemas ## ruff, pyright, and the schemas of what GitHub reads
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

schemas: linters
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA).citation-file-format CITATION.cff

format: linters ## let ruff put the sources in order
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(DOCS) ## build the site into build/site
	$(DOCS)/bin/mkdocs build --strict --site-dir build/site

docs-serve: $(DOCS) ## show the site at a local address, and changes to it
	$(DOCS)/bin/mkdocs serve

notebooks: $(DOCS) ## run the notebooks, and write their outputs into them
	$(DOCS)/bin/python scripts/notebooks.py

dist: linters ## build the wheel and the sdist into dist, and check them
	rm -rf dist
	$(VENV)/bin/python -m hatchling build --directory dist
	$(VENV)/bin/twine check --strict dist/*

clean: ## remove environments, builds and caches
	rm -rf $(ENVIRONMENTS) build dist .pytest_cache .ruff_cache .hypothesis .mypy_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
