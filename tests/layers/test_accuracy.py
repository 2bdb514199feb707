"""Tests that all norms are as exact as their arithmetic allows, on difficult inputs.

The cases are those of `experiments.accuracy`, with fresh seeds, small and prime numbers of
values, masks, and float64. Programs lowered for a GPU or a TPU also run, on the CPU.
"""

import functools
import math
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from eqx_norm._normalise.formulas.reference import statistics
from eqx_norm._normalise.variants.part import part_of
from experiments.common import exact
from experiments.common.exact import EPS, Answer, Batch
from tests.helpers import bits, f32, make, over_batch
from tests.layers.accuracy import BOUNDS, Case, cases, far_from_zero, with_outlier
from tests.layers.norms import EXAMPLE_NORMS, NORMS, made, with_parameters

pytestmark = pytest.mark.x32  # has its own dtypes

# Each case is compiled once for all seeds and tests. Few and many values; the same positions of
# several examples, and whole cache lines; rows with a prime number of values, and with several.
VECTORS = cases("BatchNorm", (2, 8), (7, 8), (121, 8), (1000, 8))
SPATIAL = cases("BatchNorm", (16, 8, 7, 7), (8, 3, 16, 16))
ROWS = cases("LayerNorm", (8, 2), (8, 121), (8, 768), (8, 1009))
IMAGE = 8, 6, 5, 7
IMAGES = {norm: Case(norm, IMAGE) for norm in EXAMPLE_NORMS}
# A GPU sums few rows, those of the second and third case, in two steps.
ELSEWHERE = [
    *cases("BatchNorm", (3, 8, 2, 2), (264, 8), (4, 8, 4, 8), platform="cuda"),
    Case("LayerNorm", (8, 121), "cuda"),
    *cases("BatchNorm", (3, 8, 2, 2), (1000, 8), platform="tpu"),
    Case("GroupNorm", IMAGE, "tpu"),
]
ONE_KERNEL = [
    Case("LayerNorm", (8, 121), "cuda", frozen=True),
    *(Case(f"{kind}Norm", IMAGE, "cuda", frozen=True) for kind in ("RMS", "Group", "Instance")),
    # In training, for short rows.
    Case("GroupNorm", (8, 6, 2, 3), "cuda"),
    Case("RMSNorm", (8, 32), "cuda"),
]
seeds = st.integers(0, 2**32 - 1)
few_examples = hypothesis.settings(max_examples=8)


def each_case(*cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def hard(case, random, dtype: Any = np.float32):
    """Yields batches with means far from zero, and batches with an outlier."""
    batch = case.batch(random, far_from_zero, dtype)
    yield batch
    # The sum of y does not depend on x: dx is rounding, and within the bound of any dx.
    if case.norm != "BatchNorm":
        ones = {"weight": np.ones_like(batch.weight), "bias": np.zeros_like(batch.bias)}
        batch = batch._replace(**ones)
    yield batch._replace(dy=np.ones_like(batch.x))
    # The first place is the worst one for a shift by the first value.
    for place in (0, random.integers(batch.x.size // case.shape[case.axis])):
        yield case.batch(random, with_outlier, place, dtype, affine=False)


@each_case(*VECTORS, *SPATIAL, *ROWS, *IMAGES.values(), *ELSEWHERE, *ONE_KERNEL)
@hypothesis.given(seeds)
@few_examples
def test_hard_values(case, seed):
    for batch in hard(case, np.random.default_rng(seed)):
        case.check(batch)


@each_case(VECTORS[0], VECTORS[-1], SPATIAL[0], ROWS[1])
@hypothesis.given(seeds)
@hypothesis.example(767)  # dweight of a batch norm of two values: 1.13e-7, in float32's units
@few_examples
def test_hard_values_in_double_precision(case, seed):
    """Scales the bounds by 2^-29, because float64 has 29 bits more."""
    with jax.enable_x64(True):
        for batch in hard(case, np.random.default_rng(seed), np.float64):
            case.check(batch, scale=2.0**-29)


@each_case(VECTORS[-1], SPATIAL[0], ROWS[1], *ELSEWHERE)
def test_first_sixteenth_far_from_the_rest(case):
    """Tests the worst x for a shift by a part's mean: on a GPU and a TPU cancellation costs a
    factor of up to 16, as `reference.statistics` says."""
    values = math.prod(case.shape) // case.shape[case.axis]
    far = slice(-(-values // 16))
    batch = case.batch(np.random.default_rng(0), with_outlier, far, affine=False)
    case.check(batch, scale=1 if case.platform == "cpu" else 16)


def test_squares_that_overflow_give_an_infinite_m2():
    """Computes operation by operation: a fused multiply-add would hide inf - inf."""
    x = np.random.default_rng(0).standard_normal((264, 8)).astype(np.float32)
    x[0] = 1e30
    of_jax = f32(x)
    with jax.disable_jit():
        _, mean, m2, _ = statistics(of_jax, shape=(1, 8), part=part_of(of_jax, (1, 8)))
    np.testing.assert_allclose(mean, x.mean(0, keepdims=True), rtol=1e-5)
    assert np.isposinf(m2).all()


GROUPS = IMAGES["GroupNorm"]
OTHERS = SPATIAL[1], *(c for c in IMAGES.values() if c != GROUPS), *ELSEWHERE[1:]


@each_case(
    *(VECTORS[1], SPATIAL[0], ROWS[1], GROUPS, ELSEWHERE[0]),
    *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS),
)
@hypothesis.given(seeds)
@few_examples
def test_hard_values_with_a_third_masked(case, seed):
    """Puts a NaN at every masked position or value."""
    random, mask = np.random.default_rng(seed), case.mask()
    for drawn in ((far_from_zero,), (with_outlier, 1)):
        batch = case.batch(random, *drawn, affine=drawn[0] is far_from_zero)
        batch.x[~exact.counted(batch, mask)] = np.nan
        case.check(batch, mask)


def normal(random, shape, mean, std, dtype: Any):
    return (mean + std * random.standard_normal(shape)).astype(jnp.dtype(dtype))


@each_case(Case("BatchNorm", (1000, 2, 1000)), Case("LayerNorm", (2, 1_000_000)))
def test_many_values(case):
    case.check(case.batch(np.random.default_rng(0), normal, 1e3, 1, np.float32))


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [
        (jnp.float16, 300, 1),
        pytest.param(jnp.float16, 0, 300, marks=pytest.mark.long),
        (jnp.bfloat16, 100, 1),
    ],
)
@each_case(SPATIAL[0], ROWS[2], GROUPS, ELSEWHERE[2], *ONE_KERNEL[::3], ONE_KERNEL[4])
@hypothesis.given(seeds)
@few_examples
def test_half_precision(case, dtype, mean, std, seed):
    """Allows an additional half ulp of the dtype. In float16, squares overflow."""
    case.check(case.batch(np.random.default_rng(seed), normal, mean, std, dtype, affine=False))


# One loop, two loops, and XLA's library, for half precision with partial sums in float32.
ALONE = cases("LayerNorm", (8, 7), (8, 768), (400, 391))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@each_case(*ALONE, Case("RMSNorm", (8, 768)), IMAGES["GroupNorm"])
@hypothesis.given(seeds)
@few_examples
def test_y_without_differentiation(case, dtype, seed):
    """Tests the variant of y that a CPU uses without differentiation."""
    random = np.random.default_rng(seed)
    constant = case.batch(random, normal, random.uniform(1e-3, 65504), 0, dtype, affine=False)
    for batch in (*hard(case, random, dtype), constant):
        y = np.asarray(undifferentiated(batch, case.norm))
        errors = exact.errors(batch, NORMS[case.norm].exact(batch), Answer(y, *[None] * 4))
        assert errors.y <= BOUNDS["y"]
        assert batch is not constant or case.norm == "RMSNorm" or not y.any()


@functools.partial(jax.jit, static_argnums=1)
def undifferentiated(batch, norm):
    layer, call = made(norm, batch.x.shape[1:], eps=EPS)
    return call(with_parameters(layer, batch.weight, batch.bias), batch.x)[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_pair_of_oneflow_6149(dtype):
    """Checks that y is right, and dx 0: https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    x = np.array([-1.83965693, -1.82964566], dtype)
    with jax.enable_x64(dtype == np.float64):
        y, pull_back = jax.vjp(LayerNorm(2, use_weight=False, use_bias=False), x)
        (dx,) = pull_back(jnp.ones_like(y))
    expected = exact.layer_norm(Batch(x[None], np.ones_like(x[None]), None, None)).answer.y[0]
    np.testing.assert_allclose(y, expected.astype(float), rtol=1e-6)
    np.testing.assert_allclose(expected.astype(float), [-0.8454, 0.8454], atol=5e-5)
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_case(VECTORS[1], SPATIAL[0], ROWS[1])
def test_non_finite_values_stay_in_their_channel_or_example(case, bad):
    random = np.random.default_rng(0)
    batch = case.batch(random, far_from_zero)
    place = tuple(random.integers(case.shape))
    spoilt = batch._replace(x=batch.x.copy())
    spoilt.x[place] = bad
    others = np.arange(case.shape[case.axis]) != place[case.axis]
    clean, affected = (case.train(b)[0] for b in (batch, spoilt))
    # Weight and bias of a layer norm have gradients from all examples.
    of_channels = ("dweight", "dbias") if case.norm == "BatchNorm" else ()
    for name in ("y", "dx", *of_channels):
        arrays = (np.asarray(getattr(answer, name)) for answer in (clean, affected))
        unaffected = [np.compress(others, a, case.axis if a.ndim > 1 else 0) for a in arrays]
        assert bits(unaffected[0]) == bits(unaffected[1]), name
    assert not np.isfinite(np.compress(~others, affected.y, case.axis)).any()


# All float32 numbers in the range may be drawn, also those without a short decimal form.
constants = st.lists(
    st.floats(float(np.float32(1e-3)), 65504, width=32), min_size=8, max_size=8
)
CONSTANT = *VECTORS, SPATIAL[0], *ROWS[1:], IMAGES["GroupNorm"], *ELSEWHERE, ONE_KERNEL[4]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, np.float32) for case in CONSTANT), (SPATIAL[0], jnp.float16)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@hypothesis.given(constants)
@hypothesis.example([1e-3, 0.1, 1 / 3, 300.0, 65504.0, 1.0, 1e4, 7.0])
@few_examples
def test_a_constant_gives_the_bias_to_the_bit(case, dtype: Any, constants):
    """Fails for a product with a rounded 1/n: https://github.com/BVLC/caffe/issues/3963."""

    def constant(_, shape):
        return np.broadcast_to(constants, shape).astype(dtype)

    batch = case.batch(np.random.default_rng(0), constant)
    answer, _ = case.train(batch)
    is_image = len(case.shape) > 2  # the bias has one value per channel
    bias = batch.bias.reshape(-1, *[1] * (len(case.shape) - 2)) if is_image else batch.bias
    assert bits(answer.y) == bits(np.broadcast_to(bias.astype(dtype), case.shape))
    if case.norm == "BatchNorm":
        assert not np.asarray(answer.variance).any()


# At 1e7, a running mean in float32 alone is wrong by up to a third of the standard deviation.
# With x64, the mean is a float64: the nearest float32 and the rest are subtracted from x.
@pytest.mark.parametrize(
    ("dtype", "ratio", "x64"),
    [("float32", 1e7, False), ("float32", 1e7, True), ("bfloat16", 100, False)],
)
def test_inference_far_from_zero(dtype, ratio, x64):
    """Compares inference after one batch with the output of training, within its bounds."""
    batch = SPATIAL[0].batch(np.random.default_rng(0), normal, ratio, 1, dtype)
    with jax.enable_x64(x64):
        layer, state = make(8, "batch", approach="batch")
        layer = with_parameters(layer, *map(jnp.asarray, (batch.weight, batch.bias)))
        _, state = over_batch(layer)(batch.x, state)
        y, _ = jax.jit(over_batch(eqx.nn.inference_mode(layer)))(batch.x, state)
    assert y.dtype == dtype
    answer = Answer(np.asarray(y, np.longdouble), *[None] * 4)
    assert exact.errors(batch, exact.batch_norm(batch), answer).y <= BOUNDS["y"]
