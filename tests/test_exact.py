"""Tests that the reference agrees with the definition, and its gradients with its slopes."""

import numpy as np
import pytest

from tests import exact
from tests.exact import EPS, Batch

RANDOM = np.random.RandomState(0)
BATCH_NORM = Batch(*(RANDOM.standard_normal(shape) for shape in ((4, 3, 5), (4, 3, 5), 3, 3)))
LAYER_NORM = Batch(*(RANDOM.standard_normal(shape) for shape in ((4, 5), (4, 5), 5, 5)))


@pytest.mark.parametrize(
    ("reference", "batch"), [(exact.batch_norm, BATCH_NORM), (exact.layer_norm, LAYER_NORM)]
)
def test_the_reference_is_the_definition(reference, batch):
    batch = Batch(*(values.astype(np.longdouble) for values in batch))
    right = reference(batch).answer
    axes, shape = ((0, 2), (3, 1)) if reference is exact.batch_norm else ((1,), (5,))
    mean, variance = batch.x.mean(axes, keepdims=True), batch.x.var(axes, keepdims=True)
    weight, bias = (values.reshape(shape) for values in (batch.weight, batch.bias))
    y = (batch.x - mean) / np.sqrt(variance + np.longdouble(EPS)) * weight + bias
    np.testing.assert_allclose(right.y.astype(float), y.astype(float), rtol=1e-13)
    assert np.abs(right.variance - variance.ravel()).max() < 1e-15
    for name in ("x", "weight", "bias"):
        values = getattr(batch, name)
        step = np.longdouble(1e-6) * RANDOM.standard_normal(values.shape)
        ends = [reference(batch._replace(**{name: values + s})).answer.y for s in (step, -step)]
        slope = np.sum((ends[0] - ends[1]) / 2 * batch.dy)
        assert abs(slope / np.sum(getattr(right, f"d{name}") * step) - 1) < 1e-7
