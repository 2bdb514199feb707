"""Tests that the accuracy experiment measures what it says, and that it sees what is wrong."""

import dataclasses

import jax
import numpy as np
import pytest

from eqx_norm.strategies import NAMED, Adam, Moments
from experiments.accuracy import __main__ as accuracy
from experiments.accuracy import approaches, cases, claims, recursions
from experiments.accuracy.approaches import APPROACHES
from experiments.accuracy.claims import NOT_SERVED, Row, Y
from experiments.accuracy.layouts import FIRST, LAYOUTS, ROWS
from experiments.lab import exact, rows
from experiments.lab.claims import judge
from experiments.lab.exact import Answer
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.peers import names

CASES = {case.name: case for case in cases.QUICK}
EASY, AFFINE = "mean/std = 1e0", "mean/std = 1e3, affine"
CONSTANTS, HALF = "constants to 1, n = 7", "float16, mean 0, std 300"
FEW_STEPS = approaches.Job(2, (1.0,), (0.5,), ("ema",))
FAR = approaches.Job(steps=40, ratios=(1e7,), momenta=(0.99,))


def run(tmp_path, stem, *chosen, **fields):
    """Returns the exit code and the rows of a run with a few cases."""
    some = tuple(CASES[name] for name in chosen)
    job = dataclasses.replace(accuracy.QUICK, cases=some, by_approach=FEW_STEPS, **fields)
    experiment = dataclasses.replace(accuracy.EXPERIMENT, quick=job, draw=lambda files: [])
    code = experiment.main(["--quick", "--out", str(tmp_path)])
    return code, rows.load(Files(tmp_path, stem).csv(), Row)


def test_a_layer_that_raises_is_said_to_fail(tmp_path, capsys):
    _, found = run(tmp_path, "accuracy", EASY, HALF)
    assert f"fails: Equinox ema, {FIRST}, {HALF}: TypeError" in capsys.readouterr().out
    of = {(row.case, row.layer): row for row in found}
    assert np.isnan(of[HALF, names.EQUINOX_EMA][3:9]).all()
    # Overflow: float16 ends at 65504, and the variance is 90,000 in every channel.
    overflown = cases.CHANNELS * CASES[HALF].draws
    assert of[HALF, names.EQUINOX_BATCH].nonfinite == overflown


def test_what_a_gpu_runs_is_rehearsed(tmp_path, capsys, monkeypatch):
    """Both layers in every layout, in files named after the device."""
    layers, chosen = (names.OURS, names.OURS_PALLAS), (EASY, AFFINE, CONSTANTS, HALF)
    code, found = run(tmp_path, "accuracy_cpu", *chosen, layers=layers, layouts=tuple(LAYOUTS))
    assert code == 0
    assert capsys.readouterr().out.count("| holds") == len(claims.CLAIMS) + 1
    measured = {(row.case, row.layout, row.layer) for row in found}
    assert len(measured) == len(found) == 2 * (4 * len(LAYOUTS) - 1)
    assert (AFFINE, ROWS, names.OURS) not in measured  # which has no weight for each channel
    unserved = [row for row in found if row.raised.startswith(NOT_SERVED)]
    assert {row.layer for row in unserved} == {names.OURS_PALLAS}
    monkeypatch.setattr(accuracy.jax, "default_backend", lambda: "gpu")
    assert accuracy.on_device(accuracy.WHOLE).layers == layers


@pytest.mark.parametrize("name", CASES)
def test_the_reference_rounded_to_the_dtype_holds_every_bound(name):
    """So the bounds can be met, and errors are not the yardstick's own."""
    batch = CASES[name].batch()
    right = exact.batch_norm(batch)
    dtypes = (batch.x.dtype, np.float32, batch.x.dtype, np.float32, np.float32)
    rounded = Answer(*(a.astype(d) for a, d in zip(right.answer, dtypes, strict=True)))
    row = Row(name, FIRST, names.OURS, *exact.errors(batch, right, rounded))
    assert not [v for v in judge(claims.CLAIMS, [row]) if v.holds is False]


@pytest.mark.parametrize(
    ("op_by_op", "fields"),
    [
        (False, {"momenta": (1e-6, 0.9999), "approaches": ("smooth_start",)}),
        # XLA then has no products and sums to make one operation of.
        (True, {"steps": 7}),
    ],
    ids=["momenta", "op by op"],
)
def test_every_approach_is_exact_far_from_zero(op_by_op, fields):
    with jax.disable_jit(op_by_op):
        measured = approaches.measure(dataclasses.replace(FAR, **fields))
    assert max(row.error for row in measured) <= Y, measured


class Short(Adam):
    """Drops what a mean in one float leaves out."""

    def infer(self, memory):
        return Moments.of(memory.mean, memory.variance)


def test_a_mean_in_one_float_is_caught(monkeypatch):
    monkeypatch.setitem(APPROACHES, "adam", (Short, recursions.adam))
    training, inference = approaches.measure(dataclasses.replace(FAR, approaches=("adam",)))
    assert training.error <= Y
    assert inference.error > 0.1


def test_the_committed_results_are_of_every_case_layer_and_approach():
    files = Files(COMMITTED, "accuracy")
    found = [(row.case, row.layer) for row in rows.load(files.csv(), Row)]
    assert found == [(case.name, layer) for case in cases.CASES for layer in accuracy.PEERS]
    found = {row.approach for row in rows.load(files.csv("_approaches"), approaches.Row)}
    assert found == {*APPROACHES} == {*NAMED}
