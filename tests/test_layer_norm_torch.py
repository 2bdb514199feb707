"""What the thread's autotest does: draw shapes, dtypes and arguments, and compare with torch.

https://github.com/Oneflow-Inc/oneflow/issues/6149
"""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import answers
from experiments.lab.exact import Batch
from experiments.lab.peers.names import OURS, TORCH

# Sums of a few hundred products, of order 1; bfloat16 keeps 8 bits of the result.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 2e-2}


@st.composite
def batches(draw):
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    hypothesis.assume(np.prod(shape) > 1)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    examples = draw(st.integers(1, 5))
    x = draw(st.floats(-5, 5)) + random.standard_normal((examples, *shape))
    dy = random.standard_normal(x.shape)
    wide = np.float64 if dtype == "float64" else np.float32
    weight, bias = (
        random.uniform(0.5, 1.5, shape).astype(wide) if draw(st.booleans()) else None
        for _ in range(2)
    )
    narrow = jnp.dtype(dtype)
    return Batch(x.astype(narrow), dy.astype(narrow), weight, bias)


@pytest.mark.peers
@hypothesis.given(batches())
@hypothesis.settings(max_examples=60)
def test_as_torch(batch):
    # A pair is at the mercy of eps and of the rounding of its mean: torch's, see
    # experiments/results/layer_norm_pair.csv.
    axes = tuple(range(1, batch.x.ndim))
    hypothesis.assume(np.min(batch.x.astype(float).std(axes)) > 0.1)
    tolerance = TOLERANCE[batch.x.dtype.name]
    ours, torch = (answers.layer_norm(name, batch) for name in (OURS, TORCH))
    for name in ours._fields:
        mine, theirs = getattr(ours, name), getattr(torch, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.shape == theirs.shape, name
            np.testing.assert_allclose(
                mine, theirs, rtol=tolerance, atol=10 * tolerance, err_msg=name
            )
