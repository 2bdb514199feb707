"""The accuracy experiment measures what it says, and says so when a claim does not hold."""

import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    accuracy,
    accuracy_approaches,
    accuracy_cases,
    accuracy_claims,
    accuracy_measured,
    results,
)
from experiments.accuracy_cases import CONSTANT, Batch
from experiments.accuracy_peers import ALWAYS, LAYERS, OURS, Layer
from experiments.accuracy_reference import (
    RSTD_UNIT,
    Answer,
    Errors,
    Reference,
    errors,
    reference,
)

CASES = {case.name: case for case in accuracy_cases.QUICK}
EASY = "mean/std = 1e0"


def test_quick_holds_every_claim(tmp_path, capsys):
    assert accuracy.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    claims = len(accuracy_claims.CLAIMS) + 1  # and that of accuracy_approaches
    assert printed.count("| holds") == claims
    assert "not installed" not in printed
    written = json.loads((tmp_path / "results" / "accuracy.json").read_text())
    assert {"device", "python", "jax", "equinox", "numpy"} <= set(written["environment"])
    assert [claim["holds"] for claim in written["claims"]] == [True] * claims
    assert (tmp_path / "figures" / "accuracy.png").stat().st_size > 10_000


FEW_STEPS = accuracy_approaches.Job(2, (1.0,), (0.5,), ("ema",))
BY_APPROACH = {accuracy_approaches.Run("ema", 0.5, 1.0, "training"): 1e-7}
# What the figure has an axis for.
FEW = (
    *(f"constants to {high}, n = 7" for high in (1, 1000, 65504)),
    EASY,
    "n = 1e1",
    "float16, mean 0, std 300",
)


def test_the_same_batches_give_the_same_files(tmp_path, capsys, monkeypatch):
    """Byte for byte, also for the figure; and a layer that raises is said to fail."""
    few = tuple(CASES[name] for name in FEW)
    monkeypatch.setattr(accuracy, "QUICK", accuracy.Job(few, ALWAYS, FEW_STEPS))
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        accuracy.main(["--quick", "--out", str(folder)])
        files = sorted(folder.rglob("*.*"))
        written.append({f.name: f.read_bytes() for f in files if f.suffix != ".json"})
    assert written[0] == written[1]
    assert set(written[0]) == {"accuracy.csv", "accuracy_approaches.csv", "accuracy.png"}
    assert "fails: Equinox ema, float16, mean 0, std 300: TypeError" in capsys.readouterr().out
    path = tmp_path / "a" / "results" / "accuracy.csv"
    measured = accuracy_measured.load(path)
    assert list(measured) == list(FEW)
    assert np.isnan(measured[FEW[-1]]["Equinox ema"]).all()
    # Overflow: float16 ends at 65504, and the variance is 90,000 in every channel.
    overflown = accuracy_cases.CHANNELS * CASES[FEW[-1]].draws
    assert measured[FEW[-1]]["Equinox batch"].nonfinite == overflown
    accuracy_measured.save(tmp_path / "again.csv", measured)
    assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()


def test_a_missing_peer_is_said(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    absent = ("flax", "torch")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else found(name)
    )
    few = tuple(CASES[name] for name in FEW)
    monkeypatch.setattr(accuracy, "WHOLE", accuracy.Job(cases=few, approaches=FEW_STEPS))
    assert accuracy.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for package in absent:
        assert f"{package} is not installed: left out (make accuracy has it)" in printed
    assert "PyTorch" not in printed
    written = json.loads((tmp_path / "results" / "accuracy.json").read_text())
    assert written["left out"] == ["flax", "torch"]


def fabricated(
    quantity: str = "y", error: float = 0.0, at: str = ""
) -> accuracy_measured.Measured:
    """No errors, but for one quantity of this layer in one case."""
    right = Errors(*(0.0,) * len(Errors._fields))
    wrong = right._replace(**{quantity: error})
    return {
        name: {
            layer.name: wrong if (name, layer.name) == (at, OURS) else right for layer in LAYERS
        }
        for name in CASES
    }


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
        ("nonfinite", 1, EASY, 9),
        ("y", np.nan, "mean/std = 1e3", 3),
        ("y", np.inf, "mean/std = 1e3", 3),
    ],
)
def test_a_wrong_layer_is_caught(quantity, error, at, claim):
    _, verdicts = accuracy.report(fabricated(quantity, error, at))
    assert [v.claim.split(".")[0] for v in verdicts if not v.holds] == [str(claim)]
    assert at in verdicts[claim - 1].measured


def test_a_claim_that_does_not_hold_is_printed_as_such(tmp_path, capsys, monkeypatch):
    measured = fabricated("y", 3e-5, "mean/std = 1e4")
    monkeypatch.setattr(accuracy, "run", lambda job: (measured, {}))
    monkeypatch.setattr(accuracy_approaches, "run", lambda job: BY_APPROACH)
    assert accuracy.main(["--quick", "--out", str(tmp_path)]) == 1
    assert accuracy.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    third = [line for line in lines if line.startswith("| 3.")]
    assert len(third) == 2
    assert all("3.0e-05 (mean/std = 1e4)" in x and "DOES NOT HOLD" in x for x in third)


def test_right_answers_have_no_claim_against_them():
    assert all(verdict.holds for verdict in accuracy_claims.judge(fabricated()))
    assert {verdict.holds for verdict in accuracy_claims.judge({})} == {None}


def like(batch: Batch, values: np.ndarray) -> np.ndarray:
    """[C, n] as the shape of the batch, [N, C, ...]."""
    n, channels, *space = batch.x.shape
    return np.moveaxis(values.reshape(channels, n, *space), 0, 1)


def exact(batch: Batch, right: Reference) -> Answer:
    """The reference, as a layer would give it."""
    y, dx = (like(batch, values) for values in (right.answer.y, right.answer.dx))
    return right.answer._replace(y=y, dx=dx)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_rounded_to_the_dtype_holds_every_bound(name):
    """So the bounds can be met, and errors are not the yardstick's own."""
    batch = CASES[name].batch()
    right = reference(batch)
    dtypes = (batch.x.dtype, np.float32, batch.x.dtype, np.float32, np.float32)
    rounded = Answer(*map(np.ndarray.astype, exact(batch, right), dtypes))
    found = errors(batch, right, rounded)
    verdicts = accuracy_claims.judge({name: {OURS: found}})
    assert all(verdict.holds is not False for verdict in verdicts), verdicts


def test_errors_are_measured_on_their_scales():
    batch = CASES["mean/std = 1e3, affine"].batch()
    right = reference(batch)
    answer = exact(batch, right)
    assert errors(batch, right, answer) == Errors(0, 0, 0, 0, 0, 0)
    # Where |xhat| is below 1, an error of y counts as it is.
    small = np.argwhere(np.abs(like(batch, right.xhat)) < 1)[0]
    y = answer.y.copy()
    y[tuple(small)] += 1e-3
    assert errors(batch, right, answer._replace(y=y)).y == pytest.approx(1e-3)
    y[tuple(small)] = np.nan
    found = errors(batch, right, answer._replace(y=y))
    assert (found.y, found.nonfinite) == (np.inf, 1)
    sum_dy = np.abs(batch.dy.astype(np.float64)).sum((0, 2))
    off = answer._replace(
        variance=answer.variance * 1.001,
        dweight=answer.dweight + 1e-4 * (sum_dy + RSTD_UNIT * np.abs(answer.dweight)),
        dbias=answer.dbias + 1e-5 * sum_dy,
    )
    found = errors(batch, right, off)
    # Of variance + eps; the smallest variance here is 0.1, which eps is 1e-4 of.
    assert found.variance == pytest.approx(1e-3, rel=2e-4)
    assert found.dweight == pytest.approx(1e-4)
    assert found.dbias == pytest.approx(1e-5)
    # dx of a unit of weight / std * max |dy|.
    std = np.sqrt(answer.variance + accuracy_cases.EPS)
    unit = batch.weight / std * np.abs(batch.dy).max((0, 2))
    off = answer._replace(dx=answer.dx + 1e-4 * unit[:, None])
    assert errors(batch, right, off).dx == pytest.approx(1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_an_ulp_is_free_and_no_more(dtype):
    name = next(name for name in CASES if name.startswith(dtype))
    batch = CASES[name].batch()
    right = reference(batch)
    answer = exact(batch, right)
    rounded = answer.y.astype(np.float32).astype(batch.x.dtype)
    # Rounded twice, by way of float32, it may be off by half an ulp of that, too.
    assert errors(batch, right, answer._replace(y=rounded)).y <= 2**-24
    ulp = float(jnp.finfo(batch.x.dtype).eps)  # of numbers from 1 to 2
    y = answer.y.copy()
    one = tuple(np.argwhere((y > 1) & (y < 1.5))[0])
    y[one] += ulp
    beyond = ulp / 2 / float(answer.y[one])
    assert errors(batch, right, answer._replace(y=y)).y == pytest.approx(beyond)


EACH_LAYER = [
    pytest.param(layer, marks=() if layer in ALWAYS else pytest.mark.peers, id=layer.name)
    for layer in LAYERS
]


@pytest.mark.parametrize("layer", EACH_LAYER)
def test_every_layer_gets_the_easy_case_right(layer: Layer):
    """The mean no larger than the standard deviation: so each is called as it should be."""
    batch = CASES[EASY].batch()
    found = errors(batch, reference(batch), layer.answer(batch))
    # 16 roundings of float32 at 6e-8 each.
    assert max(found) < 1e-6, found


def test_constants_are_those_of_caffe_3963():
    """https://github.com/BVLC/caffe/issues/3963"""
    seen = set()
    for case in CASES.values():
        if case.group == CONSTANT:
            x = case.batch().x
            assert (x == x[0]).all()
            seen |= set(x[0])
    assert {np.float32(v) for v in (1e-3, 0.1, 3.3, 1000.1, 65504)} <= seen


def test_an_output_folder_that_cannot_be_made_is_known_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        accuracy.main(["--quick", "--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def test_the_committed_results_are_of_every_case_and_layer():
    measured = accuracy_measured.load(results.FOLDER / "accuracy.csv")
    assert list(measured) == [case.name for case in accuracy_cases.CASES]
    for found in measured.values():
        assert list(found) == [layer.name for layer in LAYERS]
