"""Tests `Cumulative`, as the observation normaliser of docs/reinforcement_learning.md."""

from typing import Any

import jax
import numpy as np
import pytest

from eqx_norm.strategies import Cumulative, Moments
from tests.compiling import jit
from tests.helpers import at_step, exact, floats, make, normal, remembered

STEPS, C = 60, 3


class RunningMeanStd(Cumulative):
    def update(self, batch, memory):
        _, memory = super().update(batch, memory)
        return memory.moments, memory


@pytest.mark.parametrize(("mean", "envs", "every"), [(0.0, 8, 3), (1e4, 1, STEPS)])
@pytest.mark.filterwarnings("ignore:.* hold one value per channel")
def test_cumulative_normalises_each_step_by_all_observations_so_far(mean, envs, every):
    """Masks out one observation of `every`."""
    drift = np.linspace(0, 4, STEPS)[:, None, None]
    x = np.asarray(floats(np.asarray(normal(0, (STEPS, envs, C), mean, 0.5)) + drift))
    counts = np.arange(STEPS * envs).reshape(STEPS, envs) % every != 1
    layer, state = make(C, "env", approach=RunningMeanStd(), channelwise_affine=False)
    normalised: Any = jax.vmap(
        lambda x, mask, state: layer(x, state, mask=mask),
        axis_name="env",
        in_axes=(0, 0, None),
        out_axes=(0, None),
    )

    def push(state, step):
        y, state = normalised(*step, state)
        return state, y

    after, y = jit(lambda *xs: jax.lax.scan(push, *xs))(state, (x, counts))

    ulp = float(np.finfo(x.dtype).eps)
    for step in range(STEPS):
        seen = np.asarray(x[: step + 1][counts[: step + 1]], np.longdouble)
        expected = (x[step] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-5)
        expected[~counts[step]] = 0
        np.testing.assert_allclose(y[step], expected, rtol=32 * ulp, atol=32 * ulp)
    seen, (mean, variance) = np.asarray(x[counts], np.longdouble), remembered(layer, after)
    np.testing.assert_allclose(mean, seen.mean(0), rtol=2 * ulp)
    np.testing.assert_allclose(variance, seen.var(0), rtol=16 * ulp)


@pytest.mark.x32  # pairs of float64 are more precise than the reference
@pytest.mark.parametrize("count", [2.0**24, 1e12])
def test_cumulative_counts_batches_after_billions_of_observations_in_full(count):
    """Checks the change by 200 batches to the precision of a float, however small it is."""
    strategy, size = RunningMeanStd(), 251  # no multiple of the spacing of such floats
    before = Moments(floats(count), floats([0, 5, 1e4]), floats(count * np.array([1, 0.1, 9])))
    start = strategy.load(before)
    means = floats([1, 5, 1e4]) + 0.5 * floats(normal(1, (200, C)))
    m2 = floats(size * abs(normal(2, (200, C))))

    def push(memory, moments):
        batch = at_step(0, Moments(floats(size), *moments))
        used, memory = strategy.update(batch, memory)
        return memory, (used.mean, used.variance)

    end, (used_mean, used_variance) = jit(lambda *xs: jax.lax.scan(push, *xs))(
        start, (means, m2)
    )

    ns = np.array([float(before.known_count)] + [size] * 200, np.longdouble)
    every_mean = np.concatenate([[before.mean], means]).astype(np.longdouble)
    every_m2 = np.concatenate([[before.m2], m2]).astype(np.longdouble)
    n, mean = ns.sum(), np.average(every_mean, 0, ns)
    added = every_m2[1:].sum(0) + (ns[:, None] * (every_mean - mean) ** 2).sum(0)

    assert exact(end.count_pair) == n == exact(start.count_pair) + 200 * size
    ulp = float(np.finfo(means.dtype).eps)
    lost = 200 * ulp**2 / 2  # roundings of pairs, of 2 |log2(ulp)| bits
    for pair, begin, change in (
        (end.mean_pair, start.mean_pair, mean - every_mean[0]),
        (end.m2_pair, start.m2_pair, added),
    ):
        atol = lost * abs(exact(pair)).max() + ulp * abs(change).max()
        np.testing.assert_allclose(exact(pair) - exact(begin), change, rtol=8 * ulp, atol=atol)
    np.testing.assert_array_equal(used_mean[-1], end.mean_pair.value)
    np.testing.assert_allclose(used_variance[-1], (every_m2[0] + added) / n, rtol=4 * ulp)
