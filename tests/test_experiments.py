"""The stability experiment shows what it claims, and says so when it does not."""

import csv
import json
import re

import equinox as eqx
import jax
import numpy as np
import pytest

from experiments import stability, stability_claims, stability_runs
from experiments.lab import training
from experiments.lab.networks import Large, Small
from experiments.lab.training import Record
from experiments.stability_runs import Setting

from .compiling import filter_jit


def test_quick_holds_every_claim(tmp_path, capsys):
    assert stability.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| holds") == len(stability_claims.CLAIMS)
    with (tmp_path / "results" / "stability_claims.csv").open() as file:
        assert [row["holds"] for row in csv.DictReader(file)] == ["True"] * 5
    written = json.loads((tmp_path / "results" / "stability.json").read_text())
    assert written["seeds"] == [0, 1]
    assert {"device", "python", "jax", "equinox", "optax"} <= set(written["environment"])
    assert (tmp_path / "figures" / "stability_3_seeds.png").stat().st_size > 10_000


def test_the_same_seeds_give_the_same_csv(tmp_path):
    """Byte for byte, also for the figures."""
    small = ["--approach", "ema", "none", "--seeds", "3", "1", "--steps", "3"]
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert stability.main([*small, "--out", str(folder)]) == 0
        files = sorted(folder.rglob("*.*"))
        written.append({f.name: f.read_bytes() for f in files if f.suffix != ".json"})
    assert written[0] == written[1]
    assert set(written[0]) == {
        "stability.csv",
        "stability_claims.csv",
        "stability_gradients.csv",
        "stability_3_seeds.png",
    }
    runs = stability_runs.load(tmp_path / "a" / "results" / "stability.csv")
    assert list(runs) == [Setting("ema", 0.99), Setting("none", 0.0)]
    assert {tuple(records) for records in runs.values()} == {(3, 1)}


def fabricated(peak_of: dict[str, float]) -> stability_runs.Runs:
    def record(setting):
        flat = np.ones(20, np.float32)
        norms = np.ones((8 if setting.approach == "none" else 10, 20), np.float32)
        norms[0, 4] = peak_of.get(setting.label, 1.0)
        return Record(flat, norms, flat, flat, accuracy=flat)

    return {
        setting: {seed: record(setting) for seed in (0, 1)}
        for setting in stability_runs.SETTINGS
    }


def test_a_claim_that_does_not_hold_is_printed_as_such(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stability, "run", lambda job: fabricated({"smooth_start 0.9999": 9.0}))
    assert stability.main(["--quick", "--out", str(tmp_path)]) == 1
    assert stability.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    fifth = [line for line in lines if line.startswith("| 5.")]
    assert len(fifth) == 2
    assert all("DOES NOT HOLD" in line and "9.00 (9.00 to 9.00)" in line for line in fifth)


def test_each_verdict_follows_its_numbers():
    thread = {"ema 0.99": 9.0, "adam 0.99": 3.0}
    spikes = [v.holds for v in stability_claims.judge(fabricated(thread))]
    # The fabricated losses are all equal, so the loss of ema is not higher than batch's.
    assert spikes == [False, True, True, True, True]
    none = [v.holds for v in stability_claims.judge(fabricated({}))]
    assert none == [False, True, False, False, True]
    assert {v.holds for v in stability_claims.judge({})} == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere.*no such folder.*--data download"),
        (["--momentum", "1"], "--momentum: 1: must be between 0 and 1"),
        (["--steps", "0"], "--steps: 0: must be 1 or more"),
        (["--seeds", "-1"], "--seeds: -1: must be 0 or more"),
        (["--seeds", "one"], "--seeds: invalid natural value: 'one'"),
        (["--approach", "group"], "--approach: invalid choice: 'group'.*smooth_start"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        stability.main([*arguments, *(["--steps", "1"] if "--steps" not in arguments else [])])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not list(tmp_path.rglob("*.csv"))


def test_an_output_folder_that_cannot_be_made_is_known_before_the_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        stability.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


@pytest.mark.parametrize("network", [Small, Large])
def test_every_network_trains_with_and_without_norm(network, monkeypatch):
    for name in ("step", "_accuracy"):
        compiled = filter_jit(getattr(training, name).__wrapped__)
        monkeypatch.setattr(training, name, compiled)
    data = stability.mnist.load()
    data = data._replace(test=stability.mnist.Split(*(values[:8] for values in data.test)))
    for norm in (Setting("none", 0.0), Setting("smooth_start", 0.9)):
        make_norm = stability.make_norm(norm)
        record = training.train(network, make_norm, data, seed=0, steps=2)
        names = training.leaf_names(network, make_norm)
        assert record.gradient_norms.shape == (len(names), 2)
        assert np.isfinite(record.loss).all()
        assert np.isnan(record.accuracy[0])
        assert 0 <= record.accuracy[1] <= 1
        assert any("norm" in name for name in names) == (norm.approach != "none")


def test_the_network_of_the_issue():
    model, _ = eqx.nn.make_with_state(Small)(
        stability.make_norm(Setting("ema", 0.99)), jax.random.key(0)
    )
    assert model.linear1.weight.shape == (512, 1728)
    assert model.linear2.weight.shape == (64, 512)
    assert model.linear3.weight.shape == (10, 64)
    assert isinstance(model.norm, eqx.nn.BatchNorm)
    assert training.BATCH_SIZE == 64
    assert stability.Job().steps == 100
