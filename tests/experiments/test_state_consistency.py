"""The state consistency experiment measures what a layer does, and catches a wrong one."""

import dataclasses
import json
import typing

import numpy as np
import pytest

from eqx_norm import BatchNorm
from experiments.lab import rows
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.peers import names
from experiments.state_consistency import __main__ as main
from experiments.state_consistency.__main__ import EXPERIMENT, QUICK, WHOLE, settings
from experiments.state_consistency.row import OURS, Row
from experiments.state_consistency.script import by_hand, play, subject
from experiments.state_consistency.subjects import (
    EPS,
    JIT,
    MOMENTUM,
    OP_BY_OP,
    WAYS,
    Memory,
    usual,
    ways,
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Returns the files of one run of --quick, which fails unless every claim holds."""
    out = tmp_path_factory.mktemp("quick")
    assert EXPERIMENT.main(["--quick", "--out", str(out)]) == 0
    return Files(out, "state_consistency")


def test_every_implementation_joins_by_itself(quick):
    written = json.loads(quick.json.read_text())
    left_out = [name for name in written["left out"] if name.startswith("implementation=")]
    found = {*written["implementations"], *(name.split("'")[1] for name in left_out)}
    every = typing.get_args(typing.get_type_hints(BatchNorm)["implementation"])
    assert found == {*every} - {"device_invariant"}
    assert {"auto", "xla"} <= set(written["implementations"])


def test_quick_runs_each_combination_once(quick):
    found = rows.load(quick.csv(), Row)
    ours = [row for row in found if row[:2] == (names.OURS, "auto")]
    every = {(way, backward) for way in WAYS for backward in (False, True)}
    assert {(row.way, row.backward) for row in ours} == every
    assert {row.shape for row in ours} == {(1, 2, 3), (1, 6), (1, 6, 5), (1, 6, 1)}
    assert {row.batch for row in ours} == {"finite", "nan", "inf"}
    assert len({row.setting for row in found}) == len(found)


def test_equinox_keeps_nan_for_ever(quick):
    verdicts = EXPERIMENT.report(quick).verdicts
    assert {verdict.unlike for verdict in verdicts[-2:]} == {"Equinox ema, Equinox batch"}
    assert {verdict.unlike for verdict in verdicts[:3]} == {""}


class Fake:
    """A layer in NumPy that does as it should, but for one fault."""

    def __init__(self, row: Row, fault: str = ""):
        self.row, self.fault = row, fault
        self.mean = self.variance = np.zeros(row.shape[1], np.float32)
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
            if self.row.backward or self.fault != "learns in the backward pass":
                self._update(x)
            if self.fault == "updates twice":
                self._update(x)
        elif self.fault == "forgets all":
            self.mean, self.weight = 0 * self.mean, np.float32(0)
        self.count += int(not finite and self.fault != "does not count")
        return [x]

    def trace(self, x: np.ndarray) -> None:
        if self.fault == "fails op by op" and self.row.way == OP_BY_OP:
            raise TypeError("no.")
        if self.row.n == 1 and self.row.unbiased:
            self.count += 1
            if self.fault == "touches the state" and self.count == 1:
                self._update(x)
            if self.fault == "another error":
                raise RuntimeError("no.")
            if self.fault != "fails when run" or self.count == 1:
                raise ValueError("no.")

    def memory(self) -> Memory:
        return Memory((self.mean, self.variance, np.asarray(self.weight)), self.count)

    def _update(self, x: np.ndarray) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            mean, biased, unbiased = by_hand(x)
            swapped = self.fault == "the other variance" and self.row.n > 1
            variance = (biased, unbiased)[self.row.unbiased != swapped]
            if self.fault == "NaN for n = 1" and self.row.n == 1:
                variance = variance * np.nan
            if self.fault == "inexact mean":
                mean = mean * (1 + 2e-6)
            compiled = WAYS[self.row.way].compiled
            if self.fault == "compiled differs" and compiled and not self.weight:
                mean = np.nextafter(np.float32(mean), np.float32(9))
            if self.fault == "compiled differs later" and compiled and self.weight:
                mean = mean * (1 + 5e-7)
            if self.fault == "backward differs later" and self.row.backward and self.weight:
                mean = np.nextafter(np.float32(mean), np.float32(9))
            self.weight = np.float32(MOMENTUM * self.weight + (1 - MOMENTUM))
            share = (1 - MOMENTUM) / np.float64(self.weight)
            self.mean = (self.mean + share * (mean - self.mean)).astype(np.float32)
            new = self.variance + share * (variance - self.variance)
            self.variance = new.astype(np.float32)


@pytest.mark.parametrize(
    ("fault", "claims"),
    [
        ("", set()),
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
def test_a_wrong_layer_is_caught_and_a_right_one_is_not(fault, claims, tmp_path):
    job = dataclasses.replace(QUICK, layers=OURS, implementations=("auto", "xla"))
    measured = [play(Fake(row, fault), row) for row in settings(job)]
    files = Files(tmp_path, "state_consistency")
    rows.save(files.csv(), Row, measured, digits=9)
    verdicts = EXPERIMENT.report(files).verdicts
    assert {int(v.claim.split(".")[0]) for v in verdicts if not v.holds} == claims
    if fault == "does not count":
        assert verdicts[10].measured.startswith("in 0 of 8 rows; not float32 1x2x3, jit")


def test_by_hand_is_what_numpy_has():
    x = np.random.RandomState(1).standard_normal((4, 3, 5)).astype(np.float32)
    mean, biased, unbiased = by_hand(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(biased, wide.var((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(unbiased, wide.var((0, 2), ddof=1), rtol=1e-14)
    assert np.isnan(by_hand(x[:1, :, :1])[2]).all()


def test_an_implementation_that_cannot_run_is_left_out(monkeypatch):
    def make(row: Row):
        if row.implementation == "another's":
            raise NotImplementedError("not here")
        return Fake(row)

    monkeypatch.setattr(main, "subject", make)
    both = dataclasses.replace(QUICK, implementations=("auto", "another's"))
    job, left_out = main.present(both)
    assert job.implementations == ("auto",)
    assert list(left_out.values()) == ["NotImplementedError: not here"]


def test_the_committed_results_are_of_every_row_and_hold():
    files = Files(COMMITTED, "state_consistency")
    written = json.loads(files.json.read_text())
    found = [row.setting for row in rows.load(files.csv(), Row)]
    job = dataclasses.replace(WHOLE, implementations=tuple(written["implementations"]))
    assert found == [row.setting for row in settings(job)]
    assert all(verdict.holds for verdict in EXPERIMENT.report(files).verdicts)


@pytest.mark.peers
@pytest.mark.parametrize("name", [names.LINEN, names.NNX, names.TORCH, names.TORCH_OPERATOR])
def test_what_the_peers_do(name):
    """Each is called as it should be: its means and variances are those of the batch."""
    torch = names.package(name) == "torch"

    def found(shape, way=None, batch="finite"):
        way = way or usual(name)
        row = Row(name, "", "float32", shape, way, True, batch)
        return play(subject(row), row)

    once = found((1, 2, 3))
    assert not once.evaluation_changed
    np.testing.assert_allclose([once.updates_1, once.updates_2], 1, atol=1e-3)
    assert once.mean_error < 1e-6
    errors = once.biased_error, once.unbiased_error
    assert errors[once.unbiased] < 1e-5
    assert errors[not once.unbiased] > 0.1
    # A second forward pass, for the backward pass: functions do not mind it, objects do.
    again = found((1, 2, 3), way=ways(name)[1] if torch else JIT)
    assert round(again.updates_1) == (2 if torch else 1)
    bad = found((1, 2, 3), batch="nan")
    assert bad.memory_1 != bad.memory_2
    assert bad.nonfinite_later > 0
    one = found((1, 6))
    assert one.raised.startswith("ValueError: Expected more than 1") == (name == names.TORCH)
    if name == names.TORCH:
        assert one.memory_0 != one.memory_1  # it has counted the batch
    assert (one.nonfinite_evaluation > 0) == (name == names.TORCH_OPERATOR)
