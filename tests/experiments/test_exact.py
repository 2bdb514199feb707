"""Tests of the reference in extended precision, and of what every peer gives beside it."""

import numpy as np
import pytest

from experiments.accuracy.__main__ import PEERS as BATCH_NORMS
from experiments.accuracy.cases import QUICK
from experiments.lab import answers, exact
from experiments.lab.exact import EPS, RSTD_UNIT, Answer, Batch, Errors
from experiments.lab.peers import names
from experiments.layer_norm.__main__ import PEERS as LAYER_NORMS
from experiments.layer_norm.cases import batches

CASES = {case.name: case for case in QUICK}
# Both weight and bias; weight alone; bias alone; of examples of two dimensions.
ROWS = list(batches("float64", (2,)))
each_kind = pytest.mark.parametrize(
    # The axes of mean and variance, and those that weight and bias do not have.
    ("reference", "batch", "statistics", "parameters"),
    [
        (exact.batch_norm, CASES["mean/std = 1e3, affine"].batch(), (0, 2), (0, 2)),
        (exact.layer_norm, ROWS[0], (1, 2), (0,)),
    ],
    ids=["batch norm", "layer norm"],
)


@each_kind
def test_the_reference_is_the_definition(reference, batch, statistics, parameters):
    """The output as it is written, and gradients as finite differences."""
    batch = Batch(*(values.astype(np.longdouble) for values in batch))
    right = reference(batch).answer
    mean = batch.x.mean(statistics, keepdims=True)
    variance = batch.x.var(statistics, keepdims=True)
    weight, bias = (np.expand_dims(v, parameters) for v in (batch.weight, batch.bias))
    y = (batch.x - mean) / np.sqrt(variance + np.longdouble(EPS)) * weight + bias
    np.testing.assert_allclose(right.y.astype(float), y.astype(float), rtol=1e-13)
    np.testing.assert_allclose(
        right.variance.astype(float), variance.ravel().astype(float), rtol=1e-14
    )
    random, step = np.random.RandomState(0), np.longdouble(1e-6)
    for field in ("x", "weight", "bias"):
        direction = random.standard_normal(getattr(batch, field).shape)

        def loss(step, field=field, direction=direction):
            moved = batch._replace(**{field: getattr(batch, field) + step * direction})
            return np.sum(reference(moved).answer.y * batch.dy)

        slope = (loss(step) - loss(-step)) / (2 * step)
        expected = np.sum(getattr(right, f"d{field}") * direction)
        np.testing.assert_allclose(float(slope), float(expected), rtol=1e-7)


@each_kind
def test_errors_are_measured_on_their_scales(reference, batch, statistics, parameters):
    right = reference(batch)
    answer, xhat = right.answer, right.xhat
    assert exact.errors(batch, right, answer) == Errors(0, 0, 0, 0, 0, 0)
    dy, weight = batch.dy.astype(np.longdouble), np.expand_dims(batch.weight, parameters)
    sum_dy = np.abs(dy).sum(parameters)
    of_each_rstd = np.abs(dy * xhat).sum(parameters)
    if reference is exact.batch_norm:  # a channel has one
        of_each_rstd = np.abs(answer.dweight)
    std = np.sqrt(batch.x.astype(np.longdouble).var(statistics, keepdims=True) + EPS)
    off = Answer(
        answer.y + 1e-2 * np.maximum(1, np.abs(xhat)),
        answer.variance + 1e-3 * (answer.variance + EPS),
        answer.dx + 1e-4 * np.abs(dy * weight).max(statistics, keepdims=True) / std,
        answer.dweight + 1e-5 * (sum_dy + RSTD_UNIT * of_each_rstd),
        answer.dbias + 1e-6 * sum_dy,
    )
    found = exact.errors(batch, right, off)
    assert found == pytest.approx(Errors(1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0))
    off.y.flat[0] = np.nan
    found = exact.errors(batch, right, off._replace(variance=None))
    assert (found.y, found.nonfinite) == (np.inf, 1)
    assert np.isnan(found.variance)


@pytest.mark.parametrize(("dtype", "ulp"), [("float16", 2**-10), ("bfloat16", 2**-7)])
def test_half_an_ulp_is_free_and_no_more(dtype, ulp):
    name = next(name for name in CASES if name.startswith(dtype))
    batch = CASES[name].batch()
    right = exact.batch_norm(batch)
    rounded = right.answer.y.astype(np.float32).astype(batch.x.dtype)
    # Rounded twice, by way of float32, it may be off by half an ulp of that, too.
    found = exact.errors(batch, right, right.answer._replace(y=rounded))
    assert found.y <= 2**-24
    y = right.answer.y.copy()
    one = tuple(np.argwhere((y > 1) & (y < 1.5))[0])
    y[one] += ulp
    beyond = ulp / 2 / float(right.answer.y[one])
    found = exact.errors(batch, right, right.answer._replace(y=y))
    assert found.y == pytest.approx(beyond)


def each(layers):
    ours = ("eqx_norm", "equinox")
    return [
        pytest.param(name, marks=() if names.package(name) in ours else pytest.mark.peers)
        for name in layers
    ]


@pytest.mark.parametrize("layer", each(BATCH_NORMS))
def test_every_batch_norm_gets_the_easy_case_right(layer):
    """The mean no larger than the standard deviation: so each is called as it should be."""
    batch = CASES["mean/std = 1e0"].batch()
    found = exact.errors(batch, exact.batch_norm(batch), answers.batch_norm(layer, batch))
    # 16 roundings of float32 at 6e-8 each.
    assert max(found) < 1e-6, found


@pytest.mark.parametrize("layer", each(LAYER_NORMS))
def test_every_layer_norm_is_right_in_float64(layer):
    """And has gradients of just what it has of weight and bias."""
    for batch in ROWS:
        gave = answers.layer_norm(layer, batch)
        assert (gave.dweight is None) == (batch.weight is None)
        assert (gave.dbias is None) == (batch.bias is None)
        found = exact.errors(batch, exact.layer_norm(batch), gave)
        assert np.nanmax(found) < 1e-10, found
