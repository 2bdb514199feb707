"""Tests that the layer norm experiment finds the fault that it is about."""

import dataclasses

from experiments.lab import answers
from experiments.lab.peers import names
from experiments.layer_norm.__main__ import EXPERIMENT, Job


def test_exchanged_gradients_would_be_found(monkeypatch, tmp_path, capsys):
    """The fault of OneFlow #6149, put into this layer's answers."""
    right = answers.layer_norm

    def exchanged(layer, batch):
        answer = right(layer, batch)
        if batch.weight is None or batch.bias is None:
            return answer
        return answer._replace(dweight=answer.dbias, dbias=answer.dweight)

    monkeypatch.setattr(answers, "layer_norm", exchanged)
    run = dataclasses.replace(EXPERIMENT, quick=Job((names.OURS,), (1,)))
    assert run.main(["--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert [line[2] for line in printed.splitlines() if "DOES NOT HOLD" in line] == [*"346"]
