"""Tests that `deterministic` sets or reports settings, and that errors change nothing."""

import json
import os
import random

import jax
import numpy as np
import pytest

from eqx_norm.determinism import deterministic
from tests.processes import ROOT, python

FLAG = "--xla_gpu_deterministic_ops"


def before_and_after_jax_starts():
    """Prints what a new process sets; JAX ends the process at an unknown flag."""
    first = deterministic(0, cpu_threads=2)
    numbers = random.random(), float(np.random.uniform())
    jax.numpy.zeros(()).block_until_ready()
    second = deterministic(0, cpu_threads=2)
    print(json.dumps([first, second, numbers, os.environ["XLA_FLAGS"]]))


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    """Starts JAX, and removes the variables that `deterministic` sets or reports."""
    jax.devices()
    for name in ("XLA_FLAGS", "PJRT_NPROC", "NCCL_NVLS_ENABLE", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)


def test_deterministic_sets_all_before_jax_starts_and_may_be_called_again():
    flags = "--xla_force_host_platform_device_count=2"
    program = f"import {__name__} as test; test.before_and_after_jax_starts()"
    printed = python("-c", program, XLA_FLAGS=flags, JAX_PLATFORMS="cpu").stdout
    (first,), (settings,), numbers, set_flags = json.loads(printed)
    page = (ROOT / "docs" / "determinism.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name, *_ in first)
    *statuses, hashes, processor = (status for _, _, status, _ in first)
    assert processor == "inspected"
    assert statuses == 3 * ["set, for when JAX starts"] + 3 * ["set"]
    assert hashes == "NOT FIXED: set it in the shell"
    assert set_flags == f"{flags} {FLAG}=true"
    assert numbers == [random.Random(0).random(), np.random.RandomState(0).uniform()]
    assert [status for _, _, status, _ in settings[:3]] == 3 * ["was set"]


def test_deterministic_reports_settings_that_come_too_late():
    before = dict(jax.config.values)
    flag, _, *_, hashes, _ = deterministic(0).settings
    assert (flag.status, hashes.status[:9]) == ("not set: no GPU here", "NOT FIXED")
    # The check whether JAX has started does not change its configuration.
    assert dict(jax.config.values) == {**before, "jax_enable_pgle": False}


def test_seed_may_be_an_integer_of_numpy():
    deterministic(np.int64(3), cpu_threads=None)
    drawn = random.random(), np.random.uniform()
    assert drawn == (random.Random(3).random(), np.random.RandomState(3).uniform())


@pytest.mark.parametrize(
    ("flags", "seed", "threads", "error", "says"),
    [
        (f"{FLAG}=false", 0, None, ValueError, f"the environment says {FLAG}=false, but"),
        ("", 0, 2, RuntimeError, "JAX has started already, .* Call deterministic before any"),
        ("", 0, 0, ValueError, "cpu_threads=0.: .*threads from 1"),
    ],
)
def test_errors_of_deterministic_change_nothing(monkeypatch, flags, seed, threads, error, says):
    monkeypatch.setenv("XLA_FLAGS", flags)
    before = dict(os.environ), str(np.random.get_state())
    with pytest.raises(error, match=says):
        deterministic(seed, cpu_threads=threads)
    assert (dict(os.environ), str(np.random.get_state())) == before
