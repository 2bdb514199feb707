"""Tests that with approach="batch" the layer equals PyTorch's and Flax's over 100 steps.

`make test` compares with the golden files in `tests/golden`; `make test-peers`, where torch
and flax are installed, with the peers themselves, and those with the golden files. There
`LayerNorm` is compared with torch's, too.
"""

import functools
import importlib

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import answers, peers
from experiments.lab.exact import Batch
from experiments.lab.peers.names import OURS, OURS_UNBIASED, TORCH
from tests.golden import cases

TORCH_CASES = tuple(case for case in cases.CASES if case.peer == "torch")
each_case = pytest.mark.parametrize("case", cases.CASES, ids=str)


def ours(case: cases.Case, *, unbiased: bool) -> cases.Arrays:
    layer = peers.batch_norm(
        OURS_UNBIASED if unbiased else OURS,
        case.channels,
        momentum=1 - case.momentum if case.peer == "torch" else case.momentum,
        eps=cases.EPS,
        affine=case.affine,
    )
    # The peers start from a mean of 0 and a variance of 1, which count like any other.
    mean, variance, weight, *others = layer.memory
    memory = mean, jnp.ones_like(variance), jnp.ones_like(weight), *others
    return cases.run(case, layer, memory)


@functools.cache
def live(case: cases.Case) -> cases.Arrays:
    # Imported here: without the peers this must fail, and only when it is asked for.
    return importlib.import_module(f"tests.golden.from_{case.peer}").run(case)


def assert_same(actual: cases.Arrays, desired: cases.Arrays, but: tuple[str, ...] = ()) -> None:
    assert actual.keys() == desired.keys()
    for name in actual.keys() - set(but):
        np.testing.assert_allclose(
            actual[name], desired[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@each_case
def test_golden(case: cases.Case):
    assert_same(ours(case, unbiased=case.peer == "torch"), cases.golden(case))


@pytest.mark.peers
@each_case
def test_live(case: cases.Case):
    assert_same(ours(case, unbiased=case.peer == "torch"), live(case))


@pytest.mark.peers
@each_case
def test_golden_is_what_the_peer_gives(case: cases.Case):
    assert_same(cases.golden(case), live(case))


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_biased_is_not_what_torch_remembers(case: cases.Case):
    biased, torch = ours(case, unbiased=False), cases.golden(case)
    assert_same(biased, torch, but=("running_var", "inference"))
    n = case.values_per_channel
    # Both still hold the same share of the variance of 1 that they started from.
    initial = (1 - case.momentum) ** cases.RECORDED[-1]
    ratio = (torch["running_var"][-1] - initial) / (biased["running_var"][-1] - initial)
    np.testing.assert_allclose(ratio, n / (n - 1), rtol=1e-5)


# --- LayerNorm: what the autotest of the thread draws, shapes, dtypes and arguments.
# https://github.com/Oneflow-Inc/oneflow/issues/6149

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
def test_layer_norm_as_torch(batch):
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
