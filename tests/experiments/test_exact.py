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
LAYERS = {exact.batch_norm: CASES["mean/std = 1e3, affine"].batch(), exact.layer_norm: ROWS[0]}


@pytest.mark.parametrize("reference", LAYERS)
def test_the_reference_is_the_definition(reference):
    """The mean and variance as written, and the gradients as finite differences."""
    batch = LAYERS[reference]._replace(x=LAYERS[reference].x.astype(np.longdouble))
    right = reference(batch)
    groups, affine = batch.x, (batch.weight, batch.bias)
    if reference is exact.batch_norm:
        groups = np.moveaxis(groups, 1, 0)
        affine = (batch.weight[:, None], batch.bias[:, None])
    normalised = [(g - g.mean()) / np.sqrt(g.var() + np.longdouble(EPS)) for g in groups]
    y = np.array(normalised)
    if reference is exact.batch_norm:
        y = np.moveaxis(y, 0, 1)
    np.testing.assert_allclose(
        right.answer.y.astype(float), (y * affine[0] + affine[1]).astype(float), rtol=1e-13
    )
    variances = [float(g.var()) for g in groups]
    np.testing.assert_allclose(right.answer.variance.astype(float), variances, rtol=1e-14)

    random = np.random.RandomState(0)
    for field, gradient in (("x", "dx"), ("weight", "dweight"), ("bias", "dbias")):
        value = getattr(batch, field).astype(np.longdouble)
        direction = random.standard_normal(value.shape)

        def loss(step, value=value, field=field, direction=direction):
            moved = batch._replace(**{field: value + step * direction})
            return np.sum(reference(moved).answer.y * batch.dy)

        slope = (loss(np.longdouble(1e-6)) - loss(np.longdouble(-1e-6))) / 2e-6
        expected = np.sum(getattr(right.answer, gradient) * direction)
        np.testing.assert_allclose(float(slope), float(expected), rtol=1e-7)


def test_the_reference_of_a_pair():
    """At a distance of 2h, y is -+ h / sqrt(h^2 + eps)."""
    x = np.array([[-1.83965693, -1.82964566]])
    half = (x[0, 1] - x[0, 0]) / 2
    right = exact.layer_norm(Batch(x, np.ones_like(x), None, None)).answer
    expected = half / np.sqrt(half**2 + EPS)
    np.testing.assert_allclose(right.y.astype(float), [[-expected, expected]], rtol=1e-12)
    assert (right.dx == 0).all()


@pytest.mark.parametrize("reference", LAYERS)
def test_errors_are_measured_on_their_scales(reference):
    batch = LAYERS[reference]
    right = reference(batch)
    answer, statistics = right.answer, (0, 2) if reference is exact.batch_norm else (1, 2)
    assert exact.errors(batch, right, answer) == Errors(0, 0, 0, 0, 0, 0)
    # Where |xhat| is below 1, an error of y counts as it is; above, as a part of |xhat|.
    for place, unit in (
        (np.argwhere(np.abs(right.xhat) < 1)[0], 1),
        (np.argwhere(np.abs(right.xhat) > 1.1)[0], None),
    ):
        y = answer.y.copy()
        y[tuple(place)] += 1e-3
        unit = unit or float(np.abs(right.xhat[tuple(place)]))
        found = exact.errors(batch, right, answer._replace(y=y))
        assert found.y == pytest.approx(1e-3 / unit)
    y[tuple(place)] = np.nan
    found = exact.errors(batch, right, answer._replace(y=y))
    assert (found.y, found.nonfinite) == (np.inf, 1)

    dy, xhat = batch.dy.astype(np.longdouble), right.xhat
    others = (0, 2) if reference is exact.batch_norm else (0,)
    sum_dy = np.abs(dy).sum(others)
    if reference is exact.batch_norm:  # a channel has one rstd
        of_each_rstd = np.abs((dy * xhat).sum(others))
    else:
        of_each_rstd = np.abs(dy * xhat).sum(0)
    weight = batch.weight[:, None] if reference is exact.batch_norm else batch.weight
    std = np.sqrt(batch.x.astype(np.longdouble).var(statistics, keepdims=True) + EPS)
    unit = np.abs(dy * weight).max(statistics, keepdims=True) / std
    found = exact.errors(
        batch,
        right,
        Answer(
            answer.y,
            answer.variance + 1e-3 * (answer.variance + EPS),
            answer.dx + 1e-4 * unit,
            answer.dweight + 1e-5 * (sum_dy + RSTD_UNIT * of_each_rstd),
            answer.dbias + 1e-6 * sum_dy,
        ),
    )
    assert found == pytest.approx(Errors(0, 1e-3, 1e-4, 1e-5, 1e-6, 0))


def test_what_is_not_there_has_no_error():
    batch = ROWS[0]
    right = exact.layer_norm(batch)
    found = exact.errors(
        batch, right, Answer(right.answer.y, None, right.answer.dx, None, None)
    )
    assert np.isnan([found.variance, found.dweight, found.dbias]).all()
    assert (found.y, found.dx, found.nonfinite) == (0, 0, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_an_ulp_is_free_and_no_more(dtype):
    name = next(name for name in CASES if name.startswith(dtype))
    batch = CASES[name].batch()
    right = exact.batch_norm(batch)
    rounded = right.answer.y.astype(np.float32).astype(batch.x.dtype)
    # Rounded twice, by way of float32, it may be off by half an ulp of that, too.
    found = exact.errors(batch, right, right.answer._replace(y=rounded))
    assert found.y <= 2**-24
    y = right.answer.y.copy()
    one = tuple(np.argwhere((y > 1) & (y < 1.5))[0])
    ulp = float(2 * exact.half_ulp(y[one], batch.x.dtype))
    assert ulp == 2.0 ** {"float16": -10, "bfloat16": -7}[dtype]
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
