"""The state consistency experiment shows what it claims, and says so when it does not."""

import importlib.util
import json
import typing

import numpy as np
import pytest

from eqx_norm import _normalise
from experiments import (
    results,
    state_consistency,
    state_consistency_claims,
    state_consistency_layers,
    state_consistency_rows,
)
from experiments.lab.peers.names import OURS
from experiments.state_consistency import QUICK, WHOLE
from experiments.state_consistency_layers import (
    BY_NAME,
    EPS,
    MOMENTUM,
    UNBIASED,
    Layer,
    implementations,
)
from experiments.state_consistency_rows import Row, Setting
from experiments.state_consistency_script import by_hand, play, row
from experiments.state_consistency_subject import Average, Memory
from experiments.state_consistency_ways import JIT, OP_BY_OP, WAYS

ALL = len(state_consistency_claims.CLAIMS)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The files of one run of --quick, which fails unless every claim holds."""
    out = tmp_path_factory.mktemp("quick")
    assert state_consistency.main(["--quick", "--out", str(out)]) == 0
    return out / "results"


def test_quick_holds_every_claim(quick):
    written = json.loads((quick / "state_consistency.json").read_text())
    assert [claim["holds"] for claim in written["claims"]] == [True] * ALL
    assert {"device", "python", "jax", "equinox", "numpy"} <= set(written["environment"])
    # Every implementation joins by itself, but for those that cannot run here.
    named = [*written["implementations"], *written["implementations that cannot run here"]]
    assert sorted(named) == sorted(typing.get_args(_normalise.Implementation))
    assert {"auto", "xla"} <= set(written["implementations"])


def test_quick_runs_each_combination_once(quick):
    rows = state_consistency_rows.load(quick / "state_consistency.csv")
    ours = [s for s, _ in rows if s.layer == OURS and s.implementation == "auto"]
    assert {(s.way, s.backward) for s in ours} == {(w, b) for w in WAYS for b in (False, True)}
    assert {s.shape for s in ours} == {(1, 2, 3), (1, 6), (1, 6, 5), (1, 6, 1)}
    assert {s.batch for s in ours} == {"finite", "nan", "inf"}
    assert len({s for s, _ in rows}) == len(rows)


def test_the_file_says_all_that_the_verdicts_need(quick, tmp_path):
    path = quick / "state_consistency.csv"
    rows = state_consistency_rows.load(path)
    state_consistency_rows.save(tmp_path / "again.csv", rows)
    assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()
    written = json.loads((quick / "state_consistency.json").read_text())
    _, verdicts = state_consistency.report(rows)
    assert [verdict._asdict() for verdict in verdicts] == written["claims"]


def test_equinox_keeps_nan_for_ever(quick):
    verdicts = state_consistency.report(
        state_consistency_rows.load(quick / "state_consistency.csv")
    )[1]
    for verdict in verdicts[-2:]:
        assert verdict.not_so_with == "Equinox ema, Equinox batch"
    assert {verdict.not_so_with for verdict in verdicts[:3]} == {"-"}


class Fake:
    """A layer in NumPy that does as it should, but for one fault."""

    def __init__(self, setting: Setting, fault: str = ""):
        self.setting, self.fault = setting, fault
        self.mean = self.variance = np.zeros(setting.shape[1], np.float32)
        self.weight = np.float32(0)
        self.count = 0

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        if self.fault == "evaluation updates":
            self._update(x)
        variance = self.variance if self.weight else np.ones_like(self.variance)
        shape = (-1,) + (1,) * (x.ndim - 2)
        y = x.astype(np.float32) - self.mean.reshape(shape)
        return y / np.sqrt(variance + EPS).reshape(shape)

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        self.trace(x)
        finite = np.isfinite(np.float32(x) ** 2).all()
        if finite or self.fault == "learns what is not finite":
            if self.setting.backward or self.fault != "learns in the backward pass":
                self._update(x)
            if self.fault == "updates twice":
                self._update(x)
        elif self.fault == "forgets all":
            self.mean, self.weight = 0 * self.mean, np.float32(0)
        self.count += int(not finite and self.fault != "does not count")
        return [x]

    def trace(self, x: np.ndarray) -> None:
        if self.fault == "fails op by op" and self.setting.way == OP_BY_OP:
            raise TypeError("no.")
        if self.setting.n == 1 and BY_NAME[self.setting.layer].unbiased:
            self.count += 1
            if self.fault == "touches the state" and self.count == 1:
                self._update(x)
            if self.fault == "another error":
                raise RuntimeError("no.")
            if self.fault != "fails when run" or self.count == 1:
                raise ValueError("no.")

    def memory(self) -> Memory:
        return self.mean, self.variance, np.asarray(self.weight)

    def average(self) -> Average:
        mean, variance, weight = (array.astype(np.float64) for array in self.memory())
        return np.asarray(mean * weight), np.asarray(variance * weight)

    def rejected(self) -> float:
        return self.count

    def _update(self, x: np.ndarray) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            mean, biased, unbiased = by_hand(x)
            swapped = self.fault == "the other variance" and self.setting.n > 1
            variance = (biased, unbiased)[BY_NAME[self.setting.layer].unbiased != swapped]
            if self.fault == "NaN for n = 1" and self.setting.n == 1:
                variance = variance * np.nan
            if self.fault == "inexact mean":
                mean = mean * (1 + 2e-6)
            compiled = WAYS[self.setting.way].compiled
            if self.fault == "compiled differs" and compiled and not self.weight:
                mean = np.nextafter(np.float32(mean), np.float32(9))
            if self.fault == "compiled differs later" and compiled and self.weight:
                mean = mean * (1 + 5e-7)
            if self.fault == "backward differs later" and self.setting.backward and self.weight:
                mean = np.nextafter(np.float32(mean), np.float32(9))
            self.weight = np.float32(MOMENTUM * self.weight + (1 - MOMENTUM))
            share = (1 - MOMENTUM) / np.float64(self.weight)
            self.mean = (self.mean + share * (mean - self.mean)).astype(np.float32)
            new = self.variance + share * (variance - self.variance)
            self.variance = new.astype(np.float32)


OURS_ONLY = [
    setting
    for setting in state_consistency.settings(QUICK, ("auto", "xla"))
    if setting.layer in (OURS, UNBIASED)
]


def fabricated(fault: str = "") -> list[Row]:
    return [(setting, play(Fake(setting, fault), setting)) for setting in OURS_ONLY]


def failing(rows: list[Row]) -> set[int]:
    verdicts = state_consistency.report(rows)[1]
    return {int(v.claim.split(".")[0]) for v in verdicts if not v.holds}


def test_a_right_layer_has_no_claim_against_it():
    assert failing(fabricated()) == set()


@pytest.mark.parametrize(
    ("fault", "claims"),
    [
        ("fails op by op", {1}),
        ("evaluation updates", {2, 3, 6, 7, 8, 10, 11}),
        ("updates twice", {3, 7, 8}),
        ("learns in the backward pass", {3, 4, 5, 6}),  # MXNet #21111
        ("compiled differs", {4}),
        ("compiled differs later", {5}),
        ("backward differs later", {5}),
        ("inexact mean", {7}),
        ("the other variance", {8}),
        ("NaN for n = 1", {5, 6, 8, 9}),
        ("touches the state", {10}),
        ("another error", {10}),
        ("fails when run", {10}),
        ("learns what is not finite", {11, 12}),
        ("does not count", {11}),
        ("forgets all", {11}),
    ],
)
def test_a_wrong_layer_is_caught(fault, claims):
    assert failing(fabricated(fault)) == claims


def test_a_claim_that_does_not_hold_is_printed_as_such(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(state_consistency, "implementations", lambda: (("auto", "xla"), {}))
    monkeypatch.setattr(state_consistency, "run", lambda *_: fabricated("does not count"))
    assert state_consistency.main(["--quick", "--out", str(tmp_path)]) == 1
    assert state_consistency.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    eleventh = [line for line in lines if line.startswith("| 11.")]
    assert len(eleventh) == 2
    assert all("in 0 of 8 rows" in x and "DOES NOT HOLD" in x for x in eleventh)


def test_without_rows_no_claim_is_judged():
    assert {verdict.holds for verdict in state_consistency_claims.judge([])} == {None}


def test_by_hand_is_what_numpy_has():
    x = np.random.RandomState(1).standard_normal((4, 3, 5)).astype(np.float32)
    mean, biased, unbiased = by_hand(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(biased, wide.var((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(unbiased, wide.var((0, 2), ddof=1), rtol=1e-14)
    assert np.isnan(by_hand(x[:1, :, :1])[2]).all()


def test_an_implementation_that_cannot_run_is_left_out(monkeypatch):
    def make(setting: Setting):
        if setting.implementation == "for another device":
            raise NotImplementedError("not here")
        return Fake(setting)

    both = typing.Literal["auto", "for another device"]
    monkeypatch.setattr(_normalise, "Implementation", both)
    monkeypatch.setitem(BY_NAME, OURS, Layer(OURS, "eqx_norm", make))
    run, cannot = implementations()
    assert run == ("auto",)
    assert cannot == {"for another device": "NotImplementedError: not here"}


def test_a_missing_peer_is_said(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        state_consistency_layers,
        "find_spec",
        lambda name: None if name in ("flax", "torch") else found(name),
    )
    monkeypatch.setattr(state_consistency, "run", lambda *_: fabricated())
    assert state_consistency.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for package in ("flax", "torch"):
        assert f"{package} is not installed: left out" in printed
    written = json.loads((tmp_path / "results" / "state_consistency.json").read_text())
    assert written["left out"] == ["flax", "torch"]


def test_an_output_folder_that_cannot_be_made_is_known_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        state_consistency.main(["--quick", "--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def test_the_committed_results_are_of_every_row_and_hold():
    folder = results.FOLDER
    written = json.loads((folder / "state_consistency.json").read_text())
    rows = state_consistency_rows.load(folder / "state_consistency.csv")
    expected = state_consistency.settings(WHOLE, written["implementations"])
    assert [setting for setting, _ in rows] == list(expected)
    _, verdicts = state_consistency.report(rows)
    assert [verdict._asdict() for verdict in verdicts] == written["claims"]
    assert all(verdict.holds for verdict in verdicts)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["Flax linen", "Flax nnx", "PyTorch", "torch.batch_norm"])
def test_what_the_peers_do(name):
    """Each is called as it should be: its means and variances are those of the batch."""
    layer = BY_NAME[name]

    def found(shape, way=layer.usual, backward=True, batch="finite"):
        return row(Setting(name, "", "float32", shape, way, backward, batch))[1]

    usual = found((1, 2, 3))
    assert not usual.evaluation_changed
    np.testing.assert_allclose([usual.updates_1, usual.updates_2], 1, atol=1e-3)
    assert usual.mean_error < 1e-6
    errors = usual.biased_error, usual.unbiased_error
    assert errors[layer.unbiased] < 1e-5
    assert errors[not layer.unbiased] > 0.1
    # A second forward pass, for the backward pass: functions do not mind it, objects do.
    again = found((1, 2, 3), way=layer.ways[1] if layer.package == "torch" else JIT)
    assert round(again.updates_1) == (2 if layer.package == "torch" else 1)
    bad = found((1, 2, 3), batch="nan")
    assert bad.memory_1 != bad.memory_2
    assert bad.nonfinite_later > 0
    one = found((1, 6))
    assert one.raised.startswith("ValueError: Expected more than 1") == (name == "PyTorch")
    if name == "PyTorch":
        assert one.memory_0 != one.memory_1  # it has counted the batch
    assert (one.nonfinite_evaluation > 0) == (name == "torch.batch_norm")
