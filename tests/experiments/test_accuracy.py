"""Tests that the accuracy experiment measures what it says, and that its claims can fail."""

import dataclasses

import numpy as np
import pytest

from experiments.accuracy import __main__ as accuracy
from experiments.accuracy import approaches, cases, claims
from experiments.accuracy.cases import CHANNELS
from experiments.accuracy.layouts import FIRST, LAST, LAYOUTS, ROWS
from experiments.accuracy.rows import NOT_SERVED, Row
from experiments.lab import claims as lab
from experiments.lab import exact, rows
from experiments.lab.exact import Answer
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.peers import names

EXPERIMENT = accuracy.EXPERIMENT
CASES = {case.name: case for case in cases.QUICK}
EASY, AFFINE = "mean/std = 1e0", "mean/std = 1e3, affine"
CONSTANTS, HALF = "constants to 1, n = 7", "float16, mean 0, std 300"
FEW_STEPS = approaches.Job(2, (1.0,), (0.5,), ("ema",))


def few(*names):
    """Returns the quick job with a few of its cases."""
    chosen = tuple(CASES[name] for name in names)
    return dataclasses.replace(accuracy.QUICK, cases=chosen, by_approach=FEW_STEPS)


def test_a_layer_that_raises_is_said_to_fail(tmp_path, capsys):
    job = few(EASY, HALF)
    run = dataclasses.replace(EXPERIMENT, quick=job, draw=lambda files: [])
    run.main(["--quick", "--out", str(tmp_path)])
    assert f"fails: Equinox ema, {FIRST}, {HALF}: TypeError" in capsys.readouterr().out
    found = rows.load(tmp_path / "results" / "accuracy.csv", Row)
    of = {(row.case, row.layer): row for row in found}
    assert len(of) == 6
    assert np.isnan(of[HALF, names.EQUINOX_EMA][3:9]).all()
    # Overflow: float16 ends at 65504, and the variance is 90,000 in every channel.
    overflown = CHANNELS * CASES[HALF].draws
    assert of[HALF, names.EQUINOX_BATCH].nonfinite == overflown


def test_what_a_gpu_would_run_is_rehearsed(tmp_path, capsys, monkeypatch):
    """Every implementation in every layout, in files named after the device."""
    run = dataclasses.replace(EXPERIMENT, quick=few(EASY, AFFINE, CONSTANTS, HALF))
    assert run.main(["--quick", "--implementations", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for kernel in accuracy.KERNELS:
        assert f"{kernel} is left out: a kernel is for a GPU" in said
    found = rows.load(tmp_path / "results" / "accuracy_cpu.csv", Row)
    kinds = {(row.case, row.layout, row.layer) for row in found}
    layers = (names.OURS, names.OURS_XLA)
    assert kinds == {
        (case, layout, layer)
        for case in (EASY, AFFINE, CONSTANTS, HALF)
        for layout in LAYOUTS
        for layer in layers
        # A row of a layer norm has no weight for each channel.
        if not (case == AFFINE and layout == ROWS)
    }
    assert not any(row.raised for row in found)
    assert said.count("| holds") == len(claims.CLAIMS) + 1
    of_rows = next(row for row in found if row.layout == ROWS)
    assert np.isnan([of_rows.variance, of_rows.dweight, of_rows.dbias]).all()
    assert f"largest error of y, {LAST}" in said
    # Where there is more than a CPU that is what is run, with the kernels.
    options = EXPERIMENT.parser().parse_args([])
    assert EXPERIMENT.choose(accuracy.WHOLE, options) == accuracy.WHOLE
    monkeypatch.setattr(accuracy.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(accuracy.environment, "device_name", lambda: "nvidia-h100")
    job = EXPERIMENT.choose(accuracy.WHOLE, options)
    assert EXPERIMENT.present(job) == (job, {})
    assert job.layers == accuracy.IMPLEMENTATIONS
    assert EXPERIMENT.is_whole is not None
    assert EXPERIMENT.is_whole(job)
    assert EXPERIMENT.stem is not None
    assert EXPERIMENT.stem(job) == "accuracy_nvidia-h100"


def test_a_kernel_may_say_that_it_does_not_serve():
    batch = CASES[EASY].batch()
    given = [(batch, exact.batch_norm(batch))]
    row = accuracy._row(CASES[EASY], FIRST, names.OURS_TRITON, given)
    assert row.raised.startswith(NOT_SERVED), row


@pytest.mark.parametrize("name", CASES)
def test_the_reference_rounded_to_the_dtype_holds_every_bound(name):
    """So the bounds can be met, and errors are not the yardstick's own."""
    batch = CASES[name].batch()
    right = exact.batch_norm(batch)
    dtypes = (batch.x.dtype, np.float32, batch.x.dtype, np.float32, np.float32)
    rounded = Answer(*(a.astype(d) for a, d in zip(right.answer, dtypes, strict=True)))
    found = exact.errors(batch, right, rounded)
    row = Row(name, FIRST, names.OURS, *found)
    assert not [v for v in lab.judge(claims.CLAIMS, [row]) if v.holds is False]


def test_the_committed_results_are_of_every_case_and_layer():
    found = rows.load(Files(COMMITTED, "accuracy").csv(), Row)
    kinds = [(row.case, row.layer) for row in found]
    assert kinds == [(case.name, layer) for case in cases.CASES for layer in accuracy.PEERS]
