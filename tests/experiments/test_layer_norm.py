"""Tests that the layer norm experiment measures what it says, and that its claims can fail."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.lab import answers, claims, rows
from experiments.lab.peers import names
from experiments.layer_norm import __main__ as layer_norm
from experiments.layer_norm.claims import CLAIMS, Measured
from experiments.layer_norm.rows import EXCHANGED, ByBatchNorm, Gradients, Pair

EXPERIMENT = layer_norm.EXPERIMENT


def test_quick_holds_every_claim(tmp_path, capsys):
    assert EXPERIMENT.main(["--quick", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("| holds") == len(CLAIMS)
    results = tmp_path / "results"
    written = json.loads((results / "layer_norm.json").read_text())
    assert [claim["holds"] for claim in written["claims"]] == [True] * len(CLAIMS)
    assert (tmp_path / "figures" / "layer_norm.png").stat().st_size > 10_000
    pair = rows.load(results / "layer_norm_pair.csv", Pair)
    assert [(row.dtype, row.layer) for row in pair] == [
        (dtype, layer) for dtype in ("float32", "float64") for layer in layer_norm.QUICK.layers
    ]


def measured(**changed):
    pair = Pair("float32", names.OURS, 0.8454272, 1e-8, 0.0)
    gradient = Gradients("float32", (3,), names.OURS, 1e-8, 1e-8, 1e-8)
    by_batch_norm = ByBatchNorm("float32", names.OURS, 1e-7)
    return Measured(
        [pair._replace(**changed.get("pair", {}))],
        [
            gradient._replace(**changed.get("gradient", {})),
            Gradients("float32", (3,), EXCHANGED, 0.5, 0.5, 0.0),
        ],
        [by_batch_norm._replace(**changed.get("by_batch_norm", {}))],
    )


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"pair": {"error": 2e-3}}, [1]),
        ({"pair": {"error": 1e-9, "dtype": "float64"}}, [1]),
        ({"pair": {"dx": 1e-12}}, [2]),
        ({"gradient": {"dweight": 2e-7}}, [3]),
        ({"gradient": {"dbias": 3e-7}}, [4]),
        ({"gradient": {"dx": np.inf}}, [5]),
        ({"gradient": {"dweight": 0.5}}, [3, 6]),
        ({"by_batch_norm": {"difference": 2e-6}}, [7]),
    ],
    ids=str,
)
def test_each_verdict_follows_its_numbers(changed, wrong):
    verdicts = claims.judge(CLAIMS, measured(**changed))
    assert [i for i, v in enumerate(verdicts, 1) if not v.holds] == wrong


def test_exchanged_gradients_would_be_found(monkeypatch, tmp_path, capsys):
    """The fault of the issue, put into this layer's answers."""
    right = answers.layer_norm

    def exchanged(layer, batch):
        answer = right(layer, batch)
        if batch.weight is None or batch.bias is None:
            return answer
        return answer._replace(dweight=answer.dbias, dbias=answer.dweight)

    monkeypatch.setattr(answers, "layer_norm", exchanged)
    run = dataclasses.replace(EXPERIMENT, quick=layer_norm.Job((names.OURS,), (1,)))
    assert run.main(["--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert [line[2] for line in printed.splitlines() if "DOES NOT HOLD" in line] == [*"346"]
