"""The runs are those that the page tells of, and what is claimed of them follows from them."""

import dataclasses
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from experiments.determinism import overhead, runs
from experiments.determinism.__main__ import EXPERIMENT, QUICK
from experiments.determinism.claims import parting
from experiments.determinism.run import Run, environment
from experiments.determinism.runs import Probe, Result
from experiments.determinism.settings import FAULT, INVARIANT, NO_SEED, RECIPE, THREADS, Job
from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.networks import NETWORKS, normalised
from tests.compiling import XLA_FLAGS


def test_a_fault_is_found_and_the_rest_is_the_same(monkeypatch, tmp_path):
    """Three processes: the recipe, on one core, and with a bit flipped."""
    job = dataclasses.replace(QUICK, names=(RECIPE, FAULT), steps=3, flipped_at=1)
    quick = {"XLA_FLAGS": XLA_FLAGS}
    monkeypatch.setattr(runs, "environment", lambda run: environment(run) | quick)
    assert len(runs.distinct(job.settings)) == 3
    files = Files(tmp_path, "determinism")
    assert EXPERIMENT.measure(job, files)["steps"] == 3
    report = EXPERIMENT.report(files)
    held = [v.claim.partition(".")[0] for v in report.verdicts if v.holds]
    assert held == ["3", "7"]
    assert {v.holds for v in report.verdicts} == {True, None}
    assert "step 1: `weights.linear2.weight` forward" in report.text
    (figure,) = EXPERIMENT.draw(files)
    assert figure.stat().st_size > 10_000
    found = rows.load(files.csv(), Result)
    assert [row.by_step for row in found] == [(0, 0, 0)] * 3 + [(0, 1, 1)]
    assert len({row.fingerprint for row in found}) == 2
    probes = [probe for (probe,) in rows.load(files.csv("_probes"), Probe)]
    assert probes[0] == "`images` forward"
    flipped = found[-1]
    assert flipped.step == 1
    assert probes[flipped.by_probe.index(1)] == "`weights.linear2.weight` forward"


def test_what_parts_earlier_in_the_program_is_told_first():
    pool, norm = (
        Result("", "", "", "", "", parts, agreed, (), 0, ())
        for parts, agreed in (("`pool` cotangent", 23), ("`norm` forward", 17))
    )
    assert parting([pool, norm, pool]) == "`norm` forward, `pool` cotangent"


def test_the_whole_job_is_what_the_page_says():
    settings = Job().settings
    assert [run.threads for run in settings[THREADS].values()] == [2, 1, 3, 4, 8]
    assert not any(run.seeded for run in settings[NO_SEED].values())
    assert [run.devices for run in settings[INVARIANT].values()] == [1, 2, 4, 8]
    # A run that two settings ask for is run once.
    assert len(runs.distinct(settings)) < sum(map(len, settings.values()))


def test_a_process_finds_only_the_machine_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not {"PJRT_NPROC", "XLA_FLAGS"} & set(environment(Run(1)))
    variables = environment(Run(1, threads=3, devices=4))
    assert variables["PJRT_NPROC"] == "3"
    assert variables["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    assert variables["PATH"] == os.environ["PATH"]


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match="implementation='none'"):
        runs.measure({"broken": {"run 1": Run(1, implementation="none")}})


def test_versions_are_numbered_as_they_are_met():
    found = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "x")]
    assert runs.versions(found) == [(0, 0), (1, 0), (0, 1), (2, 0)]


class Tiny(eqx.Module):
    """Compiles quickly."""

    linear1: eqx.nn.Linear
    norm: eqx.Module
    linear2: eqx.nn.Linear

    def __init__(self, make_norm, key):
        self.linear1 = eqx.nn.Linear(784, 16, key=key)
        self.norm = make_norm(16)
        self.linear2 = eqx.nn.Linear(16, 10, key=key)

    def __call__(self, x, state):
        normed, state = normalised(self.norm, self.linear1(jnp.ravel(x)), state)
        return jax.nn.log_softmax(self.linear2(jax.nn.relu(normed))), normed, state


def test_what_probes_cost_is_counted_exactly(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)
    measured = overhead.measure(3, "tiny")
    # Three layers, forward and backward.
    assert [(row.probes, row.bytes, row.unchanged) for row in measured] == [
        (6, 8 * 6, True)
    ] * 5
    for row in measured:
        assert row.callbacks == row.transport.startswith("callbacks")
        assert 0 < row.low <= row.median <= row.high
        assert row.step > 0
