"""The layer norm experiment measures what it says, and says so when a claim does not hold."""

import json

import numpy as np
import pytest

from experiments import layer_norm, layer_norm_claims, layer_norm_gradients, layer_norm_pair
from experiments.layer_norm_layers import ALWAYS, EPS, LAYERS, OURS, Batch
from experiments.layer_norm_measured import Measured, load, save
from experiments.layer_norm_speed import Row, ratios


def test_quick_holds_every_claim(tmp_path, capsys):
    assert layer_norm.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| holds") == 7
    assert printed.count("| not run") == 1
    assert "DOES NOT HOLD" not in printed
    written = json.loads((tmp_path / "results" / "layer_norm.json").read_text())
    assert [claim["holds"] for claim in written["claims"]] == [True] * 7 + [None]
    assert (tmp_path / "figures" / "layer_norm.png").stat().st_size > 10_000
    lines = (tmp_path / "results" / "layer_norm_pair.csv").read_text().splitlines()
    assert lines[0] == "dtype,layer,y,error,dx"
    assert len(lines) == 1 + 2 * len(ALWAYS)


def measured(**changed):
    pair = layer_norm_pair.Row("float32", OURS, 0.8454272, 1e-8, 0.0)
    gradient = layer_norm_gradients.Row("float32", (3,), OURS, 1e-8, 1e-8, 1e-8)
    exchanged = layer_norm_gradients.Row("float32", (3,), "exchanged", 0.5, 0.5, 0.0)
    return Measured(
        [pair._replace(**changed.get("pair", {}))],
        [gradient._replace(**changed.get("gradient", {})), exchanged],
        [],
        changed.get("speed", []),
    )


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"pair": {"error": 2e-3}}, [1]),
        ({"pair": {"dx": 1e-12}}, [2]),
        ({"gradient": {"dweight": 2e-7}}, [3]),
        ({"gradient": {"dbias": 3e-7}}, [4]),
        ({"gradient": {"dx": np.inf}}, [5]),
        ({"gradient": {"dweight": 0.5}}, [3, 6]),
    ],
    ids=str,
)
def test_each_verdict_follows_its_numbers(changed, wrong):
    verdicts = layer_norm_claims.judge(measured(**changed))
    assert [i for i, v in enumerate(verdicts, 1) if v.holds is False] == wrong
    assert verdicts[-1].holds is None


@pytest.mark.parametrize(("ours", "holds"), [(1.0, True), (3.0, False)])
def test_a_slower_layer_is_said_to_be(ours, holds):
    times = {OURS: ours, "Equinox": 2.0}
    rows = [
        Row((8, 8), "f32", "forward + backward", name, time, time, time)
        for name, time in times.items()
    ]
    assert list(ratios(rows, "Equinox").values()) == [ours / 2]
    assert layer_norm_claims.judge(measured(speed=rows))[-1].holds is holds


def test_what_was_saved_is_loaded(tmp_path):
    rows = [Row((8, 16), "bf16", "forward", OURS, 1.5, 1.25, 2.0)]
    save(tmp_path, measured(speed=rows), {OURS: np.ones((2, len(layer_norm_pair.MEANS)))})
    assert load(tmp_path) == measured(speed=rows)


def test_exchanged_gradients_would_be_found(monkeypatch, tmp_path, capsys):
    """The fault of the issue, put into this layer's answers."""

    def exchange(batch: Batch):
        answer = LAYERS[0].answer(batch)
        if batch.weight is None or batch.bias is None:
            return answer
        return answer._replace(dweight=answer.dbias, dbias=answer.dweight)

    wrong = layer_norm.Job((LAYERS[0]._replace(answer=exchange),), (1,), ())
    monkeypatch.setattr(layer_norm, "QUICK", wrong)
    assert layer_norm.main(["--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert [line[2] for line in printed.splitlines() if "DOES NOT HOLD" in line] == [*"346"]


def test_the_exact_answer_is_the_definition():
    (batch, *_) = layer_norm_gradients.batches("float64", (2,))
    answer, xhat = layer_norm_gradients.exact(batch)
    x = batch.x[0].astype(np.longdouble)
    expected = (x - x.mean()) / np.sqrt(x.var() + np.longdouble(EPS))
    np.testing.assert_allclose(xhat[0].astype(float), expected.astype(float), rtol=1e-14)
    # By finite differences, in a direction.
    direction = np.random.RandomState(0).standard_normal(batch.x.shape)

    def loss(step):
        moved = batch._replace(x=batch.x + step * direction)
        return np.sum(layer_norm_gradients.exact(moved)[0].y * batch.dy)

    slope = (loss(np.longdouble(1e-6)) - loss(np.longdouble(-1e-6))) / 2e-6
    np.testing.assert_allclose(float(slope), float(np.sum(answer.dx * direction)), rtol=1e-8)


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        layer_norm.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err
