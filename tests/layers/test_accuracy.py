"""Tests that all norms are as exact as their arithmetic allows, on difficult inputs.

The cases are those of `experiments.accuracy`, with fresh seeds, small and prime numbers of
values, masks, and float64. Programs lowered for a GPU or a TPU also run, on the CPU.
"""

from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests import exact
from tests.exact import Answer, Batch
from tests.helpers import bits, make, over_batch
from tests.layers.accuracy import (
    BOUNDS,
    check,
    far_from_zero,
    forward,
    make_batch,
    seeds,
    train,
    with_outlier,
)
from tests.layers.norms import NORMS, PARTS, mask_shape, with_parameters

pytestmark = pytest.mark.x32  # has its own dtypes


class Case(NamedTuple):
    """Holds a norm, the shape of a batch, the platform, and whether weights are frozen."""

    norm: str
    shape: tuple[int, ...]
    platform: str = "cpu"
    frozen: bool = False  # on a GPU, y and dx are then one kernel each

    def __str__(self):
        words = self.norm, "x".join(map(str, self.shape)), self.platform, "frozen" * self.frozen
        return " ".join(word for word in words if word not in ("cpu", ""))

    @property
    def axis(self):
        """Returns the axis along which moments differ: of channels, or of examples."""
        return 1 if self.norm == "BatchNorm" else 0

    def batch(self, random, draw, *args, affine=False):
        """Returns a batch; `draw` returns a column for each channel or example."""
        sizes = list(self.shape)
        columns = sizes.pop(self.axis)
        x = draw(random, (int(np.prod(sizes)), columns), *args).reshape(*sizes, columns)
        x = np.ascontiguousarray(np.moveaxis(x, -1, self.axis))
        return make_batch(random, x, norm=self.norm, affine=affine)

    def mask(self):
        """Returns a mask that excludes every third position (or value) from the first on, and
        the second example."""
        shape = mask_shape(self.norm, self.shape)
        mask = np.arange(np.prod(shape)).reshape(shape) % 3 != 0
        mask[1] = False
        if "axis=0, split" in self.norm:
            mask = np.repeat(mask[:, :PARTS], mask.shape[1] // PARTS, 1)
        return mask

    def check(self, batch, mask=None, scale=1.0):
        check(batch, mask, self.norm, self.platform, self.frozen, scale=scale)

    def answer(self, batch, mask=None):
        return train(batch, mask, self.norm, self.platform, self.frozen)[0]


def cases(norm, *shapes, **options):
    return [Case(norm, shape, **options) for shape in shapes]


# Each case is compiled once for all seeds. Few and many values, powers of two, primes.
VECTORS = cases("BatchNorm", *((n, 8) for n in (1, 2, 7, 9, 10, 64, 121, 1000)))
SPATIAL = cases("BatchNorm", (10, 8, 10), (16, 4, 7, 7), (8, 3, 16, 16), (16, 8, 8, 8))
ROWS = cases("LayerNorm", *((8, n) for n in (1, 2, 7, 121, 768, 1009)))
IMAGES = [
    Case(norm, (4, 6, 5, 7)) for norm in ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
]
ELSEWHERE = [
    Case(*args, platform=platform)
    for platform in ("cuda", "tpu")
    for args in [("BatchNorm", (7, 8)), ("BatchNorm", (3, 8, 2, 2)), ("LayerNorm", (8, 121))]
]
# Few rows, which a GPU sums in two steps.
ELSEWHERE += cases("BatchNorm", (264, 8), (4, 8, 4, 8), platform="cuda")
ONE_KERNEL = [
    Case(norm, shape, "cuda", frozen=True)
    for norm, *shapes in [
        ("LayerNorm", (8, 121), (8, 3, 5, 7)),
        ("RMSNorm", (8, 121)),
        ("GroupNorm", (8, 6, 5, 7)),
        ("InstanceNorm", (8, 6, 5, 7)),
    ]
    for shape in shapes
]
# One kernel in training, for short rows.
ONE_KERNEL += cases("GroupNorm", (8, 24), (4, 6, 2, 3), platform="cuda")
ONE_KERNEL += cases("RMSNorm", (8, 32), platform="cuda")
# Examples that are split along a mapped axis.
SPLIT = [
    Case(f"{norm}, split", shape)
    for norm, shape in [
        ("LayerNorm", (4, 112)),
        ("LayerNorm", (4, 8, 5, 7)),
        ("RMSNorm", (4, 112)),
        ("LayerNorm, axis=0", (4, 16, 5)),
        ("RMSNorm, axis=0", (4, 16, 5)),
        ("GroupNorm", (4, 6, 8, 7)),
        ("InstanceNorm", (4, 6, 8, 7)),
    ]
]
# Few channels, prime numbers of values, and a million values per channel.
LARGE = cases("BatchNorm", (4001, 3), (509, 2, 31), (1000, 2, 1000))

few_examples = hypothesis.settings(max_examples=8)


def each_case(*cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def in_test_long(*cases):
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


def hard(case, random, dtype: Any = np.float32):
    """Yields batches with means far from zero, and batches with an outlier."""
    batch = case.batch(random, far_from_zero, dtype, affine=True)
    yield batch
    # The sum of y does not depend on x: dx is rounding, and within the bound of any dx.
    if case.norm != "BatchNorm":
        ones = {"weight": np.ones_like(batch.weight), "bias": np.zeros_like(batch.bias)}
        batch = batch._replace(**ones)
    yield batch._replace(dy=np.ones_like(batch.x))
    # The first place is the worst one for a shift by the first value.
    for place in (0, random.integers(batch.x.size // case.shape[case.axis])):
        yield case.batch(random, with_outlier, place, dtype)


@pytest.mark.filterwarnings("ignore:.* hold one value per")
@each_case(*VECTORS, *SPATIAL, *ROWS, *IMAGES, *ELSEWHERE, *ONE_KERNEL, *SPLIT[:3])
@hypothesis.given(seeds)
@few_examples
def test_hard_values(case, seed):
    for batch in hard(case, np.random.default_rng(seed)):
        case.check(batch)


@each_case(*VECTORS[1:3], *VECTORS[5::2], SPATIAL[0], ROWS[2], ROWS[4])
@hypothesis.given(seeds)
@hypothesis.example(767)  # dweight of a batch norm of two values: 1.13e-7, in float32's units
@hypothesis.example(787545)  # dbias of a layer norm of eight examples: 2.04e-7
@few_examples
def test_hard_values_in_double_precision(case, seed):
    """Scales the bounds by 2^-29, because float64 has 29 bits more."""
    with jax.enable_x64(True):
        for batch in hard(case, np.random.default_rng(seed), np.float64):
            case.check(batch, scale=2.0**-29)


@each_case(
    *(*VECTORS[2::3], SPATIAL[0], ROWS[3], IMAGES[0], *SPLIT[:3]),
    *in_test_long(*SPATIAL[1:], *IMAGES[1:], *ELSEWHERE[1:3], *ELSEWHERE[4:], *SPLIT[3:]),
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


@each_case(*LARGE, Case("LayerNorm", (2, 1_000_000)))
@hypothesis.given(seeds)
@hypothesis.settings(max_examples=1)
def test_many_values(case, seed):
    affine = case.norm == "LayerNorm"
    args = normal, 1e3, 1, np.float32
    case.check(case.batch(np.random.default_rng(seed), *args, affine=affine))


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [
        (jnp.float16, 300, 1),
        pytest.param(jnp.float16, 0, 300, marks=pytest.mark.long),
        pytest.param(jnp.bfloat16, 100, 1, marks=pytest.mark.long),
    ],
)
@each_case(VECTORS[5], SPATIAL[1], ROWS[2], ROWS[4], *IMAGES[1:], *ELSEWHERE[1:], *ONE_KERNEL)
@hypothesis.given(seeds)
@few_examples
def test_half_precision(case, dtype, mean, std, seed):
    """Allows an additional half ulp of the dtype. In float16, squares overflow."""
    case.check(case.batch(np.random.default_rng(seed), normal, mean, std, dtype))


# One loop, two loops, and XLA's library, for half precision with partial sums in float32.
ALONE = [
    *cases("LayerNorm", (8, 7), (8, 121), (8, 768), (400, 391)),
    *cases("RMSNorm", (8, 7), (8, 768), (32, 512)),
    *IMAGES[2:],
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@each_case(*ALONE)
@hypothesis.given(seeds)
@few_examples
def test_y_without_differentiation(case, dtype, seed):
    """Tests the form of y that a CPU uses without differentiation."""
    random = np.random.default_rng(seed)
    constant = np.full(case.shape, random.uniform(1e-3, 65504), dtype)
    constant = make_batch(random, constant, norm=case.norm, affine=False)
    for batch in (*hard(case, random, dtype), constant):
        y = np.asarray(forward(batch, case.norm))
        answer = Answer(y, *[None] * 4)
        errors = exact.errors(batch, NORMS[case.norm].exact(batch), answer)
        assert errors.y <= BOUNDS["y"]
        assert batch is not constant or case.norm == "RMSNorm" or not y.any()


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
@each_case(VECTORS[2], VECTORS[-1], SPATIAL[1], ROWS[2])
def test_non_finite_values_stay_in_their_channel_or_example(case, bad):
    random = np.random.default_rng(0)
    batch = case.batch(random, far_from_zero, affine=True)
    place = tuple(random.integers(case.shape))
    spoilt = batch._replace(x=batch.x.copy())
    spoilt.x[place] = bad
    others = np.arange(case.shape[case.axis]) != place[case.axis]
    clean, affected = (case.answer(b) for b in (batch, spoilt))
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
CONSTANT = [
    *cases("BatchNorm", *((n, 8) for n in (2, 7, 9, 121, 1613)), (8, 8, 5, 5)),
    *cases("LayerNorm", (8, 7), (8, 9), (8, 121)),
    Case("GroupNorm", (8, 6, 5, 7)),
    Case("InstanceNorm", (8, 6, 5, 7)),
    *ELSEWHERE,
    ONE_KERNEL[-3],
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, np.float32) for case in CONSTANT),
        *((VECTORS[2], half) for half in (jnp.float16, jnp.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@hypothesis.given(constants)
@hypothesis.example([1e-3, 0.1, 1 / 3, 300.0, 65504.0, 1.0, 1e4, 7.0])
def test_a_constant_gives_the_bias_to_the_bit(case, dtype: Any, constants):
    """Fails for a product with a rounded 1/n: https://github.com/BVLC/caffe/issues/3963."""

    def constant(_, shape):
        return np.broadcast_to(constants, shape).astype(dtype)

    batch = case.batch(np.random.default_rng(0), constant, affine=True)
    answer = case.answer(batch)
    is_image = len(case.shape) > 2  # the bias has one value per channel
    bias = batch.bias.reshape(-1, *[1] * (len(case.shape) - 2)) if is_image else batch.bias
    assert bits(answer.y) == bits(np.broadcast_to(bias.astype(dtype), case.shape))
    if case.norm == "BatchNorm":
        assert not np.asarray(answer.variance).any()


# At 1e7, a running mean in float32 alone is wrong by up to a third of the standard deviation.
# With x64, the mean is a float64: the nearest float32 and the rest are subtracted from x.
@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 1e7), ("bfloat16", 100)])
@pytest.mark.parametrize("x64", [False, True], ids=["float32 memory", "float64 memory"])
@pytest.mark.parametrize("shape", [(64, 8), (16, 8, 7, 7)], ids=["vectors", "images"])
def test_inference_far_from_zero(dtype, ratio, x64, shape):
    """Compares inference after one batch with the output of training, within its bounds."""
    random = np.random.default_rng(0)
    batch = make_batch(random, (ratio + random.standard_normal(shape)).astype(jnp.dtype(dtype)))
    with jax.enable_x64(x64):
        layer, state = make(8, "batch", approach="batch")
        layer = with_parameters(layer, *map(jnp.asarray, (batch.weight, batch.bias)))
        _, state = over_batch(layer)(batch.x, state)
        y, _ = jax.jit(over_batch(eqx.nn.inference_mode(layer)))(batch.x, state)
    assert y.dtype == dtype
    answer = exact.Answer(np.asarray(y, np.longdouble), None, None, None, None)
    assert exact.errors(batch, exact.batch_norm(batch), answer).y <= BOUNDS["y"]
