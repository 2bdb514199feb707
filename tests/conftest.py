"""Runs every test with the annotations checked at run time, and with warnings as errors."""

import contextlib
import gc

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.compiling import unoptimised
from tests.processes import ROOT

# Before anything imports eqx_norm.
jaxtyping.install_import_hook("eqx_norm", "beartype.beartype")

# A second run reads the programs that the first has compiled, and takes 60% of the time.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# JAX's objects live as long as its caches: searching them for garbage every 700 objects, as
# Python does by default, takes a tenth of the time.
gc.set_threshold(100_000, 20, 20)

# No deadline, because the first example of a shape compiles. The same examples in every run: a
# run that fails, fails again.
hypothesis.settings.register_profile(
    "eqx_norm", deadline=None, max_examples=40, derandomize=True
)
hypothesis.settings.load_profile("eqx_norm")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without optimisation: files of tests make arrays when they are imported."""
    with unoptimised():
        return (yield)


@pytest.fixture
def unchecked(monkeypatch):
    """Turns the checks of annotations off: users have none, and here they would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _nans_are_made_on_purpose(request):
    """Lets a test marked `nans` make NaN where `make test-long` sets `jax_debug_nans`."""
    is_marked = request.node.get_closest_marker("nans")
    with jax.debug_nans(False) if is_marked else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs(request):
    """Reads a file's compiled programs, and drops them afterwards; all together take 5 GB. In a
    file with `UNOPTIMISED = True` they are compiled without optimisation.

    A folder for each file of tests, which one process runs: JAX's cache does not keep a process
    from reading what another has half written.
    """
    folder = ROOT / "build" / "jax-cache" / request.module.__name__
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    is_quick = getattr(request.module, "UNOPTIMISED", False)
    with unoptimised() if is_quick else contextlib.nullcontext():
        yield
    jax.clear_caches()
    gc.collect()
