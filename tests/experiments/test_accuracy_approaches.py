"""Tests that every approach is as exact as `batch`, in training and inference, for long."""

import dataclasses

import numpy as np
import pytest

from eqx_norm.strategies import NAMED, Adam, Moments
from experiments.accuracy import approaches
from experiments.accuracy.approaches import QUICK, WHOLE, Job, Row, Statistics
from experiments.accuracy.claims import EVERY_APPROACH, Y
from experiments.lab import rows
from experiments.lab.experiment import COMMITTED, Files
from tests.helpers import over_batch
from tests.strategies.recursions import CASES, IDS

FAR = Job(steps=40, ratios=(1e7,), momenta=(0.99,))


@pytest.mark.parametrize(
    "job",
    [
        dataclasses.replace(FAR, implementation="device_invariant"),
        dataclasses.replace(
            FAR, steps=60, momenta=(1e-6, 0.9999), approaches=("smooth_start",)
        ),
    ],
    ids=["device invariant", "momenta"],
)
def test_far_from_zero(job):
    measured = approaches.measure(job)
    assert len(measured) == 2 * len(job.approaches) * len(job.momenta)
    assert max(row.error for row in measured) <= Y, measured


def test_op_by_op():
    """XLA then has no products and sums to make one operation of."""
    job = dataclasses.replace(FAR, steps=7)
    measured = approaches.measure(job, lambda layer, x, state: over_batch(layer)(x, state))
    assert max(row.error for row in measured) <= Y, measured


class Short(Adam):
    """Drops what a mean in one float leaves out."""

    def infer(self, memory):
        return Moments.of(memory.mean, memory.variance)


def test_a_mean_in_one_float_is_caught(monkeypatch):
    monkeypatch.setattr(approaches, "strategy", lambda _, momentum: Short(momentum))
    job = dataclasses.replace(QUICK, approaches=("adam",), ratios=(1e3, 1e7))
    measured = approaches.measure(job)
    of = {(row.use, row.ratio): row.error for row in measured}
    assert max(of["training", 1e3], of["training", 1e7]) <= Y
    assert of["inference", 1e3] > 10 * Y
    assert of["inference", 1e7] > 0.1
    verdict = EVERY_APPROACH.verdict(measured)
    assert not verdict.holds
    assert "adam, inference, mean/std = 1e7" in verdict.measured


@pytest.mark.parametrize("approach", [name for name in NAMED if name in IDS])
def test_the_yardstick_is_the_recursion(approach):
    """Which `test_strategies` writes out as well."""
    golden = dict(zip(IDS, CASES, strict=True))[approach][1]
    random = np.random.RandomState(0)
    channels = approaches.CHANNELS
    history = [Statistics(*random.uniform(1, 2, (2, channels))) for _ in range(9)]
    ours = approaches.recursion(approach, 0.7, iter(history))
    for found, right in zip(ours, golden(history, 0.7), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), right, rtol=1e-14)


def test_of_several_roundings_the_error_is_the_largest():
    x = np.random.RandomState(0).standard_normal((4, approaches.CHANNELS, 3))
    right = approaches.of_batch(x)
    xhat = (x - right.mean[:, None]) / np.sqrt(right.variance[:, None] + 1e-5)
    assert approaches.error(xhat, x, right) < 1e-15
    y = np.array(xhat)
    y[1, 2, 0] = 5.0
    expected = abs(5 - xhat[1, 2, 0]) / max(1, abs(xhat[1, 2, 0]))
    assert approaches.error(y, x, right) == pytest.approx(float(expected))
    y[0, 0, 0] = np.nan
    assert approaches.error(y, x, right) == np.inf


def test_the_committed_results_are_of_every_approach():
    measured = rows.load(Files(COMMITTED, "accuracy").csv("_approaches"), Row)
    right = {
        (approach, momentum, ratio, use)
        for approach in NAMED
        for momentum in WHOLE.momenta
        for ratio in WHOLE.ratios
        for use in ("training", "inference")
    }
    assert {row[:4] for row in measured} == right
