"""Tests that the accuracy experiment measures what it says, and that its claims can fail."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.accuracy import __main__ as accuracy
from experiments.accuracy import approaches, cases, claims
from experiments.accuracy.cases import CHANNELS, CONSTANT
from experiments.accuracy.layouts import FIRST, LAST, LAYOUTS, ROWS
from experiments.accuracy.rows import NOT_SERVED, Row
from experiments.lab import claims as lab
from experiments.lab import exact, rows
from experiments.lab.exact import Answer, Errors
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


def test_quick_holds_every_claim(tmp_path, capsys):
    assert EXPERIMENT.main(["--quick", "--out", str(tmp_path)]) == 0
    count = len(claims.CLAIMS) + 1
    assert capsys.readouterr().out.count("| holds") == count
    written = json.loads((tmp_path / "results" / "accuracy.json").read_text())
    assert [claim["holds"] for claim in written["claims"]] == [True] * count
    assert (tmp_path / "figures" / "accuracy.png").stat().st_size > 10_000


def test_a_layer_that_raises_is_said_to_fail(tmp_path, capsys):
    job = few(EASY, HALF)
    run = dataclasses.replace(EXPERIMENT, quick=job, draw=lambda files: [])
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        run.main(["--quick", "--out", str(folder)])
        written.append({f.name: f.read_bytes() for f in folder.rglob("*.csv")})
    assert set(written[0]) == {"accuracy.csv", "accuracy_approaches.csv"}
    assert written[0] == written[1]
    assert f"fails: Equinox ema, {FIRST}, {HALF}: TypeError" in capsys.readouterr().out
    found = rows.load(tmp_path / "a" / "results" / "accuracy.csv", Row)
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
    """On a CPU it does; and what is not served is nothing against it, but an error is."""
    batch = CASES[EASY].batch()
    given = [(batch, exact.batch_norm(batch))]
    row = accuracy._row(CASES[EASY], FIRST, names.OURS_TRITON, given)
    assert row.raised.startswith(NOT_SERVED), row
    served = fabricated()
    assert all(verdict.holds for verdict in judged([*served, row]))
    failed = row._replace(raised="RuntimeError: out of memory")
    assert not all(verdict.holds for verdict in judged([*served, failed]))


def fabricated(quantity="y", error=0.0, at="", layout=FIRST):
    """Returns rows without an error but for one quantity of this package's in one case."""
    right = Errors(0, 0, 0, 0, 0, 0)
    wrong = right._replace(**{quantity: error})
    return [
        Row(name, layout, layer, *(wrong if (name, layer) == (at, names.OURS) else right))
        for name in CASES
        for layer in accuracy.PEERS
    ]


def judged(measured):
    return lab.judge(claims.CLAIMS, measured)


@pytest.mark.parametrize(
    ("quantity", "error", "at", "claim"),
    [
        ("y", 1e-30, "constants to 1, n = 7", 1),
        ("variance", 1e-30, "constants, n = 9, affine", 2),
        ("y", 1.1e-6, "mean/std = 1e7", 3),
        ("variance", 5.1e-7, "outlier first", 4),
        ("dx", 1.1e-6, "OneFlow's pair", 5),
        ("dweight", 1.1e-7, "n = 1e4", 6),
        ("dbias", 2.1e-7, "n = 1e1", 7),
        ("y", 1.1e-6, "float16, mean 300, std 1", 8),
        ("dx", 1.1e-6, "bfloat16, mean 100, std 1", 8),
        ("nonfinite", 1.0, EASY, 9),
        ("y", np.inf, "mean/std = 1e3", 3),
    ],
)
def test_a_wrong_layer_is_caught(quantity, error, at, claim):
    verdicts = judged(fabricated(quantity, error, at))
    assert [v.claim.split(".")[0] for v in verdicts if not v.holds] == [str(claim)]
    assert at in verdicts[claim - 1].measured
    # By whichever implementation, in whichever layout.
    several = [*fabricated(), *fabricated(quantity, error, at, LAST)]
    assert f"{at}; {names.OURS}; {LAST}" in judged(several)[claim - 1].measured


def test_a_layer_that_raises_holds_nothing():
    wrong = Row(EASY, FIRST, names.OURS, raised="ValueError: no")
    measured = [wrong if (r.case, r.layer) == (EASY, names.OURS) else r for r in fabricated()]
    assert [v.claim[0] for v in judged(measured) if not v.holds] == [*"345679"]


def test_right_answers_have_no_claim_against_them():
    assert all(verdict.holds for verdict in judged(fabricated()))
    assert {verdict.holds for verdict in judged([])} == {None}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_rounded_to_the_dtype_holds_every_bound(name):
    """So the bounds can be met, and errors are not the yardstick's own."""
    batch = CASES[name].batch()
    right = exact.batch_norm(batch)
    dtypes = (batch.x.dtype, np.float32, batch.x.dtype, np.float32, np.float32)
    rounded = Answer(*(a.astype(d) for a, d in zip(right.answer, dtypes, strict=True)))
    found = exact.errors(batch, right, rounded)
    verdicts = judged([Row(name, FIRST, names.OURS, *found)])
    assert all(verdict.holds is not False for verdict in verdicts), verdicts


def test_constants_are_those_of_caffe_3963():
    """https://github.com/BVLC/caffe/issues/3963"""
    seen = set()
    for case in CASES.values():
        if case.group == CONSTANT:
            x = case.batch().x
            assert (x == x[0]).all()
            seen |= set(x[0])
    assert {np.float32(v) for v in (1e-3, 0.1, 3.3, 1000.1, 65504)} <= seen


def test_the_committed_results_are_of_every_case_and_layer():
    found = rows.load(Files(COMMITTED, "accuracy").csv(), Row)
    kinds = [(row.case, row.layer) for row in found]
    assert kinds == [(case.name, layer) for case in cases.CASES for layer in accuracy.PEERS]
