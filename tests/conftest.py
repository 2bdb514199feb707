"""Runs every test with the annotations checked at run time, and with warnings as errors."""

import gc

import hypothesis
import jax
import jaxtyping
import pytest

# Before anything imports eqx_norm.
jaxtyping.install_import_hook("eqx_norm", "beartype.beartype")

# What JAX makes lives as long as its caches: to look through it for garbage every 700 objects,
# as Python does by default, is a tenth of all the time.
gc.set_threshold(100_000, 20, 20)

# The first example of a shape compiles, which takes as long as it takes.
hypothesis.settings.register_profile("eqx_norm", deadline=None, max_examples=40)
hypothesis.settings.load_profile("eqx_norm")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_dropped():
    """Drops what a file's tests have compiled: that of all of them together takes 5 GB."""
    yield
    jax.clear_caches()
    gc.collect()
