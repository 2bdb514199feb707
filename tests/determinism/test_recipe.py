"""`deterministic` sets what it can, says what it cannot, and breaks nothing."""

import json
import os
import random

import jax
import numpy as np
import pytest

from eqx_norm.determinism import deterministic
from tests.determinism.harness import ROOT, python

FLAG = "--xla_gpu_deterministic_ops"
VARIABLES = ("XLA_FLAGS", "PJRT_NPROC", "NCCL_NVLS_ENABLE", "PYTHONHASHSEED")

# Here JAX has not started yet. It ends the process at a flag that it does not know.
FRESH = """
import json, os, random
import jax, numpy as np
from eqx_norm.determinism import deterministic

first = deterministic(7, cpu_threads=3)
numbers = random.random(), float(np.random.uniform())
jax.numpy.zeros(()).block_until_ready()
second = deterministic(7, cpu_threads=3)
del os.environ["PJRT_NPROC"]
try:
    deterministic(7, cpu_threads=3)
except RuntimeError as error:
    late = str(error)
print(json.dumps([first, second, numbers, os.environ["XLA_FLAGS"], late]))
"""


@pytest.fixture(scope="module")
def fresh():
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        flags = "--xla_force_host_platform_device_count=2"
        result = python("-c", FRESH, PYTHONHASHSEED="0", XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


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


def test_before_jax_starts_all_is_set(fresh):
    (settings,), _, _, flags, _ = fresh
    assert statuses(settings) == {
        FLAG: "set, for when JAX starts",
        "NCCL_NVLS_ENABLE": "set, for when JAX starts",
        "PJRT_NPROC": "set, for when JAX starts",
        "random.seed": "set",
        "numpy.random.seed": "set",
        "jax_enable_pgle": "set",
        "jax_default_prng_impl": "checked",
        "PYTHONHASHSEED": "set in the shell",
    }
    assert flags == f"--xla_force_host_platform_device_count=2 {FLAG}=true"


def test_jax_starts_with_it_and_it_may_be_said_again(fresh):
    _, (settings,), numbers, _, late = fresh
    found = statuses(settings)
    assert {found[name] for name in (FLAG, "NCCL_NVLS_ENABLE", "PJRT_NPROC")} == {"was set"}
    # Python's and NumPy's generators have been seeded.
    assert numbers == [random.Random(7).random(), np.random.RandomState(7).uniform()]
    # Too late it is an error, that says what to do.
    assert late.startswith("deterministic(seed=7, cpu_threads=3): JAX has started already")
    assert "PJRT_NPROC=3 (the same pieces of work on any number of cores)" in late
    assert "Call deterministic before the first jnp.zeros(())" in late


def test_too_late_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match=rf"the backend 'gpu', and {FLAG}=true"):
        deterministic(0)


def test_without_a_gpu_its_flags_are_not_missed():
    assert statuses(deterministic(0).settings)[FLAG] == "not set: no GPU here"
    assert "XLA_FLAGS" not in os.environ


@pytest.mark.parametrize("spelled", ["", "=true", "=1", "=True", "=false --x=1 " + FLAG])
def test_a_flag_that_is_set_is_recognised(monkeypatch, spelled):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp {FLAG}{spelled}")
    assert statuses(deterministic(0).settings)[FLAG] == "was set"


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "words"),
    [
        ("XLA_FLAGS", f"{FLAG}=false", {}, f"the environment says {FLAG}=false, and it takes"),
        ("PJRT_NPROC", "4", {"cpu_threads": 2}, "PJRT_NPROC=4, and it takes PJRT_NPROC=2"),
        ("NCCL_NVLS_ENABLE", "1", {}, "NCCL_NVLS_ENABLE=1, and it takes"),
        ("XLA_FLAGS", "flags.txt", {}, f"'flags.txt' names a file.*Write {FLAG}=true into it"),
        ("UNRELATED", "", {"cpu_threads": 0}, "cpu_threads=0.: it takes at least one thread"),
        ("UNRELATED", "", {"seed": 2**32}, "seeds are from 0 to"),
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


def test_looking_whether_jax_has_started_leaves_the_configuration_alone():
    before = dict(jax.config.values)
    deterministic(0)
    assert dict(jax.config.values) == {**before, "jax_enable_pgle": False}


def test_what_is_not_fixed_is_said(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with jax.default_prng_impl("rbg"):
        recipe = deterministic(0)
    found = {name: rest for name, *rest in recipe.settings}
    assert found["jax_default_prng_impl"][:2] == ["rbg", "NOT FIXED: threefry2x32 is"]
    assert found["PYTHONHASHSEED"][:2] == ["random", "NOT FIXED: set it in the shell"]
    assert found["PJRT_NPROC"][:2] == ["5 cores", "NOT FIXED: cpu_threads=..."]


def test_the_table_is_aligned():
    recipe = deterministic(0)
    header, *lines = str(recipe).splitlines()
    starts = [header.index(word) for word in ("setting", "value", "status", "what for")]
    for line, setting in zip(lines, recipe.settings, strict=True):
        cells = zip(setting, starts, strict=True)
        assert all(line[start:].startswith(cell) for cell, start in cells)


def test_the_page_tells_of_each_setting():
    page = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    for setting in deterministic(0).settings:
        assert f"`{setting.name}" in page
