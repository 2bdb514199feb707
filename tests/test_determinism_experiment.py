"""The determinism experiment runs what it says, and says so when a claim does not hold."""

import dataclasses
import json
import os

import pytest

from experiments import determinism, determinism_claims, determinism_runs, determinism_settings
from experiments.determinism_overhead import Overhead
from experiments.determinism_run import Run, environment
from experiments.determinism_runs import Result, Setting
from experiments.determinism_settings import FAULT, INVARIANT, NO_SEED, RECIPE, THREADS, Job

from .compiling import XLA_FLAGS


def test_a_fault_is_found_and_the_rest_is_the_same(monkeypatch, tmp_path, capsys):
    """Three processes: the recipe, on one core, and with a bit flipped."""
    job = dataclasses.replace(
        determinism_settings.QUICK, names=(RECIPE, FAULT), steps=3, flipped_at=1
    )
    monkeypatch.setattr(determinism, "QUICK", job)
    quick = {"XLA_FLAGS": XLA_FLAGS}
    monkeypatch.setattr(determinism_runs, "environment", lambda run: environment(run) | quick)
    assert determinism_runs.count(job.settings) == 3
    assert determinism.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| holds") == 2
    assert "`weights.linear2.weight` forward" in printed
    written = json.loads((tmp_path / "results" / "determinism.json").read_text())
    assert [claim["holds"] for claim in written["claims"]].count(True) == 2
    assert (tmp_path / "figures" / "determinism.png").stat().st_size > 10_000
    found = determinism_runs.load(tmp_path / "results" / "determinism.csv")
    assert [row.by_step for row in found] == [(0, 0, 0)] * 3 + [(0, 1, 1)]
    assert len({row.fingerprint for row in found}) == 2
    probes = (tmp_path / "results" / "determinism_probes.csv").read_text().splitlines()[1:]
    assert probes[0] == "`images` forward"
    flipped = found[-1]
    assert flipped.step == 1
    assert probes[flipped.by_probe.index(1)] == "`weights.linear2.weight` forward"


PROBES = ["`images` forward", *determinism_claims.NORM]
SAME = Result("", "run 1", "1.0", "aa", "0.5", "", 70, (0, 0), 0, (0,) * 5)
OTHER = SAME._replace(
    fingerprint="bb", parts="step 0: `norm` forward", by_step=(1, 1), by_probe=(0, 1, 0, 0, 0)
)
NUMBERS = Overhead("small", "outputs", 1.0, 1.01, 1.0, 1.02, 12, 96, 0, True)


def found(name, *rows):
    return [row._replace(setting=name) for row in rows]


@pytest.mark.parametrize(
    ("number", "rows", "holds"),
    [
        (1, found(NO_SEED, SAME, OTHER), True),
        (1, found(NO_SEED, SAME, OTHER, OTHER), False),
        (3, found(RECIPE, SAME, SAME), True),
        (3, found(RECIPE, SAME, OTHER), False),
        (3, found(RECIPE, SAME, SAME._replace(final_loss="0.25")), False),
        (6, found(INVARIANT, SAME, OTHER), False),
        (6, found(INVARIANT, SAME, OTHER._replace(by_probe=(0, 0, 0, 0, 1))), False),
        (6, found(INVARIANT, SAME, OTHER._replace(by_probe=(1, 0, 0, 0, 0))), True),
        (7, found(FAULT, SAME, OTHER), False),
        (7, found(FAULT, SAME, SAME), False),
        (
            7,
            found(
                FAULT, SAME, OTHER._replace(parts="step 5: `weights.linear2.weight` forward")
            ),
            True,
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_each_verdict_follows_its_runs(number, rows, holds):
    verdicts = determinism_claims.judge(rows, PROBES, 5)
    assert {v.holds for i, v in enumerate(verdicts, 1) if i != number} == {None}
    assert verdicts[number - 1].holds is holds


@pytest.mark.parametrize(("median", "holds"), [(1.01, True), (1.2, False)])
def test_probes_that_cost_more_are_said_to(median, holds):
    overhead = [NUMBERS._replace(median=median), NUMBERS._replace(transport="callbacks")]
    assert determinism_claims.judge([], PROBES, 5, overhead)[-1].holds is holds


def test_a_claim_that_fails_is_printed_and_is_the_exit_code(monkeypatch, tmp_path, capsys):
    rows = found(RECIPE, SAME, OTHER)
    monkeypatch.setattr(determinism_runs, "measure", lambda settings, after: (rows, PROBES))
    assert determinism.main(["--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "2 runs, 2 sets of bits; step 0: `norm` forward" in printed
    assert printed.count("DOES NOT HOLD") == 1


def test_what_parts_earlier_in_the_program_is_told_first():
    later = OTHER._replace(agreed=23, parts="step 0: `pool` cotangent")
    assert determinism_claims.parting([SAME, later, OTHER._replace(agreed=17), later]) == (
        "step 0: `norm` forward, step 0: `pool` cotangent"
    )


def test_what_was_saved_is_loaded(tmp_path):
    determinism_runs.save(tmp_path / "a.csv", [SAME, OTHER])
    assert determinism_runs.load(tmp_path / "a.csv") == [SAME, OTHER]


def test_the_whole_job_is_what_the_page_says():
    settings = {setting.name: setting for setting in Job().settings}
    assert [run.threads for run in settings[THREADS].runs] == [2, 1, 3, 4, 8]
    assert not any(run.seeded for run in settings[NO_SEED].runs)
    assert [run.devices for run in settings[INVARIANT].runs] == [
        1,
        2,
        4,
        8,
    ]
    assert all(len(setting.runs) == len(setting.varied) for setting in settings.values())
    # A run that two settings ask for is run once.
    assert determinism_runs.count(Job().settings) < sum(
        len(setting.runs) for setting in settings.values()
    )


def test_a_process_finds_only_the_machine_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "PJRT_NPROC" not in environment(Run(1))
    assert "XLA_FLAGS" not in environment(Run(1))
    variables = environment(Run(1, threads=3, devices=4))
    assert variables["PJRT_NPROC"] == "3"
    assert variables["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    assert variables["PATH"] == os.environ["PATH"]


def test_a_run_that_fails_says_why():
    broken = Setting("broken", (Run(1, implementation="none"),), ("run 1",))
    with pytest.raises(RuntimeError, match="implementation='none'"):
        determinism_runs.measure([broken])


def test_versions_are_numbered_as_they_are_met():
    runs = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "x")]
    assert determinism_runs._versions(runs) == [(0, 0), (1, 0), (0, 1), (2, 0)]
