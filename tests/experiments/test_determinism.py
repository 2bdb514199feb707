"""Runs are started on the machine that is asked for, and are told apart by their bits."""

import dataclasses
import os

import pytest

from experiments.determinism import overhead, runs
from experiments.determinism.__main__ import EXPERIMENT, QUICK
from experiments.determinism.run import Run, environment
from experiments.determinism.runs import FAULT, RECIPE, Probe, Result
from experiments.lab import rows
from experiments.lab.experiment import Files
from tests.compiling import XLA_FLAGS


def test_a_fault_is_found_and_the_rest_is_the_same(monkeypatch, tmp_path):
    """Four processes: twice the recipe, once on one core, and once with a bit flipped."""
    job = dataclasses.replace(QUICK, names=(RECIPE, FAULT), steps=3, flipped_at=1)
    quick = {"XLA_FLAGS": XLA_FLAGS}
    monkeypatch.setattr(runs, "environment", lambda run: environment(run) | quick)
    files = Files(tmp_path, "determinism")
    EXPERIMENT.measure(job, files)
    report = EXPERIMENT.report(files)
    held = {v.claim.partition(".")[0]: v.holds for v in report.verdicts if v.holds is not None}
    assert held == {"3": True, "6": True}
    (figure,) = EXPERIMENT.draw(files)
    assert figure.stat().st_size > 10_000
    *same, flipped = rows.load(files.csv(), Result)
    assert [row.by_step for row in same] == [(0, 0, 0)] * 3
    assert (flipped.by_step, flipped.step) == ((0, 1, 1), 1)
    assert flipped.parts == "step 1: `weights.linear2.weight` forward"
    probes = [probe for (probe,) in rows.load(files.csv("_probes"), Probe)]
    assert probes[0] == "`images` forward"
    assert probes[flipped.by_probe.index(1)] == "`weights.linear2.weight` forward"


def test_a_process_finds_only_the_machine_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not {"PJRT_NPROC", "XLA_FLAGS"} & set(environment(Run(1)))
    variables = environment(Run(1, threads=3, devices=4))
    assert variables["PJRT_NPROC"] == "3"
    assert variables["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    assert variables["PATH"] == os.environ["PATH"]


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)Run\(steps=0.*ended with 1.*TypeError"):
        runs.measure({"broken": {"run 1": Run(steps=0)}})


def test_versions_are_numbered_as_they_are_met():
    found = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "x")]
    assert runs.versions(found) == [(0, 0), (1, 0), (0, 1), (2, 0)]


def test_what_probes_cost_is_counted_exactly():
    measured = overhead.measure(3, "perceptron")
    # Three layers, forward and backward.
    assert [row[-4:] for row in measured] == [
        (6, 8 * 6, 0, True),
        (6, 8 * 6, 0, True),
        (6, 8 * 6, 1, True),
    ]
    assert all(0 < row.low <= row.median <= row.high and row.step > 0 for row in measured)
