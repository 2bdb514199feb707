"""`deterministic` sets what it can, says what it cannot, and breaks nothing."""

import json
import os
import random

import jax
import numpy as np
import pytest

from eqx_norm.determinism import deterministic
from tests.processes import ROOT, python

FLAG = "--xla_gpu_deterministic_ops"
VARIABLES = ("XLA_FLAGS", "PJRT_NPROC", "NCCL_NVLS_ENABLE", "PYTHONHASHSEED")

# Here JAX has not started yet. It ends the process at a flag that it does not know.
FRESH = """
import json, os, random
import jax, numpy as np
from eqx_norm.determinism import deterministic

first = deterministic(0, cpu_threads=2)
numbers = random.random(), float(np.random.uniform())
jax.numpy.zeros(()).block_until_ready()
second = deterministic(0, cpu_threads=2)
del os.environ["PJRT_NPROC"]
try:
    deterministic(0, cpu_threads=2)
except RuntimeError as error:
    late = str(error)
print(json.dumps([str(first), second, numbers, os.environ["XLA_FLAGS"], late]))
"""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    """Starts JAX, empties the environment, and puts the generators back."""
    jax.devices()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def statuses(settings):
    return {name: status for name, _, status, _ in settings}


def test_before_jax_starts_all_is_set_and_afterwards_it_may_be_said_again():
    flags = "--xla_force_host_platform_device_count=2"
    printed = python("-c", FRESH, XLA_FLAGS=flags, JAX_PLATFORMS="cpu").stdout
    table, (settings,), numbers, set_flags, late = json.loads(printed)
    assert f"```\n{table}\n```" in (ROOT / "docs" / "determinism.md").read_text("utf-8")
    assert set_flags == f"{flags} {FLAG}=true"
    assert numbers == [random.Random(0).random(), np.random.RandomState(0).uniform()]
    found = statuses(settings)
    assert {found[name] for name in (FLAG, "NCCL_NVLS_ENABLE", "PJRT_NPROC")} == {"was set"}
    # Too late it is an error, that says what to do.
    assert late.startswith("deterministic(seed=0, cpu_threads=2): JAX has started already")
    assert "PJRT_NPROC=2 (the same pieces of work on any number of cores)" in late
    assert "Call deterministic before the first jnp.zeros(())" in late


def test_too_late_only_what_the_backend_reads_is_missed(monkeypatch):
    before = dict(jax.config.values)
    assert statuses(deterministic(0).settings)[FLAG] == "not set: no GPU here"
    assert "XLA_FLAGS" not in os.environ
    # Looking whether JAX has started leaves its configuration alone.
    assert dict(jax.config.values) == {**before, "jax_enable_pgle": False}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match=rf"the backend 'gpu', and {FLAG}=true"):
        deterministic(0)


@pytest.mark.parametrize("spelled", ["", "=1", "=True", "=false --x=1 " + FLAG])
def test_a_flag_that_is_set_is_recognised(monkeypatch, spelled):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp {FLAG}{spelled}")
    assert statuses(deterministic(0).settings)[FLAG] == "was set"


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "words"),
    [
        ("XLA_FLAGS", f"{FLAG}=false", {}, f"the environment says {FLAG}=false, and it takes"),
        ("PJRT_NPROC", "4", {"cpu_threads": 2}, "PJRT_NPROC=4, and it takes PJRT_NPROC=2"),
        ("UNRELATED", "", {"cpu_threads": 0}, "cpu_threads=0.: .*threads from 1"),
        ("UNRELATED", "", {"seed": -1}, r"seed=-1, .*seeds are from 0 to"),
    ],
)
def test_an_error_changes_nothing(monkeypatch, variable, value, arguments, words):
    monkeypatch.setenv(variable, value)
    before = state()
    with pytest.raises(ValueError, match=words):
        deterministic(**{"seed": 0, **arguments})
    assert state() == before


def state():
    """Returns what `deterministic` sets, but for Python's generator, which beartype uses."""
    variables = {name: os.environ.get(name) for name in VARIABLES}
    return variables, np.random.get_state(legacy=False)["state"]["key"].tobytes()


def test_what_is_not_fixed_is_said(monkeypatch):
    assert statuses(deterministic(0).settings)["PYTHONHASHSEED"].startswith("NOT FIXED: set")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert statuses(deterministic(0).settings)["PYTHONHASHSEED"] == "set in the shell"
