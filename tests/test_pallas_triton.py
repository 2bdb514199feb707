"""The Pallas-Triton kernels compute what the reference does, in Pallas's interpreter.

That they are lowered for a GPU, test_pallas_lowering.py tells.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import pallas_triton, pallas_triton_lanes, reference, tiling

from .compiling import jit
from .helpers import bits, f32

ULP = 2.0**-23  # of float32
EPS = 1e-5  # the layer's

# The same work cut up in other ways, so that few values get to all parts of a kernel: one
# program does all of it, chunk after chunk; or each has one chunk, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_MOST_HELD": 128, "_HELD": 16},
    "slices": {"_PROGRAMS": 2**20, "_MOST_HELD": 128, "_HELD": 8, "_SLICE": 1},
}
SHAPES = {
    "columns": (37, 5, 1),
    "full tiles": (256, 32, 1),
    "a prime of rows": (1021, 33, 1),
    "one row": (1, 3, 1),
    "images": (7, 17, 11),
    "an ensemble": (2, 3, 129, 5, 1),
    "rows": (5, 1, 1, 1023),
    "rows of one value": (3, 1, 1, 1),
    "rows of 7": (9, 1, 1, 7),
    "long rows": (2, 1, 1, 2500),
    "rows of images": (3, 3, 1100),
    "an ensemble of them": (2, 2, 3, 1024),
    "one channel": (37, 1, 5),
    "many slices": (40001, 8, 1),
}


@pytest.fixture(autouse=True)
def _tree(monkeypatch):
    """The interpreter would add the lanes one after the other, which Triton does not."""

    def total(values, axis):
        while (half := values.shape[axis] // 2) > 0:
            front, back = jnp.split(values, [half], axis)
            values = front + back
        return values.squeeze(axis)

    monkeypatch.setattr(pallas_triton_lanes, "total", total)


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)


def normal(shape, dtype="float32", mean=0.0, seed=0):
    values = np.random.RandomState(seed).standard_normal(shape)
    return jnp.asarray(values + mean, dtype)


def some(shape):
    """A mask, in which the first value does not count."""
    mask = np.random.RandomState(1).random((*shape[:-2], 1, shape[-1])) < 0.6
    mask[..., 0, :, 0] = False
    return jnp.asarray(mask)


def statistics(x, mask=None):
    # How the work is cut up is no argument: without this, the first cut would serve all.
    return compiled_statistics(*(getattr(tiling, name) for name in CUTS["slices"]))(x, mask)


@functools.cache
def compiled_statistics(*cut):
    return jit(functools.partial(pallas_triton.statistics, interpret=True))


def check(x, mask=None):
    count, mean, rest, m2 = (np.asarray(v, np.float64) for v in statistics(x, mask))
    x = np.asarray(x, np.float64)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), x.shape)
    axes = (-3, -1)
    n = mask.sum(axes)
    safe = np.maximum(n, 1)
    exact = np.where(mask, x, 0).sum(axes) / safe
    deviations = np.where(mask, x - exact[..., None, :, None], 0)
    variance = (deviations**2).sum(axes) / safe
    np.testing.assert_array_equal(count, n)
    # The bounds of the reference. Of the 1e-6 by which y may be wrong, this is a fifth.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + EPS))
    assert np.all(np.abs(mean - exact) <= 4 * ULP * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / safe - variance) <= 5e-7 * (variance + EPS))


@pytest.mark.parametrize(
    ("cut", "shape", "masked"),
    [
        *itertools.product(["as it is"], SHAPES, [False, True]),
        # More than one program can merge.
        *itertools.product(["slices"], ["many slices"], [False, True]),
        *itertools.product(["loops"], ["a prime of rows", "long rows"], [False, True]),
        *itertools.product(["slices"], ["images", "rows of images"], [False, True]),
    ],
    indirect=["cut"],
)
def test_statistics(cut, shape, masked):
    shape = SHAPES[shape]
    check(normal(shape, mean=3.0), some(shape) if masked else None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["images", "rows"])
def test_statistics_of_half_precision(dtype, shape):
    # No overflow at 300, whose squares float16 cannot hold.
    check(normal(SHAPES[shape], dtype, mean=300.0))


@pytest.mark.parametrize("shape", [(1021, 4, 1), (2, 1, 1, 1023)])
@pytest.mark.parametrize("mean", [1e3, 1e5, 1e7])
def test_far_from_0(shape, mean):
    check(normal(shape, mean=mean))


@pytest.mark.parametrize("shape", [(1021, 4, 1), (2, 1, 1, 1023)])
@pytest.mark.parametrize("outlier", [1e3, -1e6])
def test_an_outlier_in_first_place(shape, outlier):
    check(normal(shape).at[..., 0, :, 0].set(outlier))


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        *itertools.product(["as it is"], [(7, 6, 1), (6, 1, 1, 7)]),
        *itertools.product(CUTS, [(121, 6, 1), (6, 1, 1, 300)]),
    ],
    indirect=["cut"],
)
def test_constants_are_exact(cut, shape):
    """https://github.com/BVLC/caffe/pull/3963"""
    constants = f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0])
    vector = constants[:, None] if shape[1] > 1 else constants[:, None, None, None]
    x = jnp.broadcast_to(vector, shape)
    for mask in (None, some(shape)):
        count, mean, rest, m2 = statistics(x, mask)
        present = np.asarray(count).ravel() > 0
        expected = np.where(present, np.asarray(constants), 0)
        np.testing.assert_array_equal(np.asarray(mean).ravel(), expected)
        assert not np.any(rest)
        assert not np.any(m2)


@pytest.mark.parametrize("shape", [(37, 3, 1), (2, 1, 1, 300)])
def test_what_does_not_count_is_not_looked_at(shape):
    x, mask = normal(shape), some(shape)
    hidden = jnp.where(mask, x, jnp.nan)
    assert bits(statistics(x, mask)[1]) == bits(statistics(hidden, mask)[1])
    nothing = statistics(x * jnp.inf, jnp.zeros_like(mask))
    assert not np.any(np.stack(nothing))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_channel(bad):
    x = normal((300, 3, 1))
    y = x.at[200, 1].set(bad)
    before, after = np.stack(statistics(x)), np.stack(statistics(y))
    assert bits(after[:, ::2]) == bits(before[:, ::2])
    assert not np.isfinite(after[1:, 1]).any()


def _pulled_sums(activation, *arrays):
    return pallas_triton.pulled_sums(activation, *arrays, interpret=True)


@functools.partial(jit, static_argnums=0)
def summands(activation, g, a, b, x, mean, rest, mask):
    """Returns g through the activation, the deviations, and g as it is given."""
    wide = g.astype(jnp.float32)
    given = reference.counted(wide, mask)
    d = reference.counted(reference.centred(x, mean, rest), mask)
    if activation is None:
        return given, d, given
    present = () if mask is None else (mask,)
    return reference.slope(activation, wide, a, b, x, mean, rest, *present), d, given


def check_sums(activation, shape, masked, dtype="float32", g_dtype="float32"):
    mean, a, b = (normal((*shape[:-3], 1, shape[-2], 1), seed=i) for i in (2, 3, 4))
    rest = 1e-8 * a
    x, g = normal(shape, dtype), normal(shape, g_dtype, seed=5)
    mask = some(shape) if masked else None
    # A slope is not calculated where nothing counts.
    x = x if mask is None else jnp.where(mask, x, jnp.nan)
    sums = jit(functools.partial(_pulled_sums, activation))(g, a, b, x, mean, rest, mask)
    pulled, d, given = (
        np.asarray(values, np.float64)
        for values in summands(activation, g, a, b, x, mean, rest, mask)
    )
    axes = (-3, -1)
    for got, factor in zip(sums, (1, d), strict=True):
        terms = pulled * factor
        assert got.shape == mean.shape
        assert got.dtype == jnp.float32
        error = np.abs(np.asarray(got, np.float64) - terms.sum(axes, keepdims=True))
        # The bound of weight and bias; and a slope is about 1, wrong by ulps of 1.
        most = 2e-7 * np.abs(terms).sum(axes, keepdims=True)
        if activation is not None:
            most += 4 * ULP * np.abs(given * factor).sum(axes, keepdims=True)
        assert np.all(error <= most)


@pytest.mark.parametrize(
    ("cut", "shape", "masked"),
    [
        *itertools.product(["as it is"], ["columns", "an ensemble", "rows of 7"], [False]),
        *itertools.product(["as it is"], ["images", "rows", "one channel"], [True]),
        *itertools.product(["slices"], ["many slices"], [False]),
        *itertools.product(["loops"], ["a prime of rows", "long rows"], [False, True]),
        *itertools.product(["slices"], ["images", "rows of images"], [False, True]),
    ],
    indirect=["cut"],
)
def test_pulled_sums(cut, shape, masked):
    check_sums(jax.nn.silu, SHAPES[shape], masked)


@pytest.mark.parametrize("activation", [None, jax.nn.relu, jnp.tanh, jax.nn.gelu])
def test_pulled_sums_of_activations(activation):
    check_sums(activation, (37, 5, 1), masked=True)


@pytest.mark.parametrize("g_dtype", ["float32", "bfloat16"])
def test_g_has_its_own_precision(g_dtype):
    check_sums(None, (37, 5, 1), masked=False, dtype="bfloat16", g_dtype=g_dtype)


@pytest.mark.parametrize("cut", ["loops"], indirect=True)
def test_equal_values_do_not_round_the_same_way(cut):
    """Each lane adds 256 of them, and all lanes the same: no error is averaged out."""
    g = jnp.full((1, 1, 1, 2**17), 0.1)
    zero = jnp.zeros((1, 1, 1, 1))
    sums = jit(functools.partial(_pulled_sums, None))(g, None, None, g, zero, zero, None)
    exact = np.float64(g[0, 0, 0, 0]) * g.size
    assert abs(float(sums[0][0, 0, 0, 0]) - exact) <= 2e-7 * exact


def test_what_it_does_not_serve_it_says():
    def why(shape, dtype="float32", activation=None):
        return pallas_triton.serves(jax.ShapeDtypeStruct(shape, dtype), None, activation)

    assert why((8, 3, 1)) is None
    assert why((8, 3, 1), "bfloat16", jax.nn.silu) is None
    assert "float64" in str(why((8, 3, 1), "float64"))
    assert "complex64" in str(why((8, 3, 1), "complex64"))
    assert "empty" in str(why((0, 3, 1)))
    assert "rows" in str(why((2**16, 3, 2**16)))
    assert "erfc" in str(why((8, 3, 1), activation=_exact_gelu))
    assert "cumsum" in str(why((8, 3, 1), activation=lambda u: jnp.cumsum(u[None])[0]))
    assert "bfloat16" in str(why((8, 3, 1), activation=_in_half_precision))
    array = jnp.arange(3.0)
    assert "arrays of its own" in str(why((8, 3, 1), activation=lambda u: u * array[1]))
    assert "(axis 0" in str(why((8, 3, 1), activation=lambda u: u.sum(0)))


def _exact_gelu(u):
    return jax.nn.gelu(u, approximate=False)


def _in_half_precision(u):
    return jnp.tanh(u.astype(jnp.bfloat16)).astype(jnp.float32)


def test_a_jax_without_the_backend(monkeypatch):
    monkeypatch.setattr(pallas_triton, "triton", None)
    x = jax.ShapeDtypeStruct((8, 3, 1), "float32")
    assert "no Pallas-Triton" in str(pallas_triton.serves(x))


SIZES = (1, 2, 7, 31, 100, 128, 1000, 2049, 16384, 16385, 50176, 10**6)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inputs", [1, 2])
def test_tilings(itemsize, inputs):
    for n, size in itertools.product(SIZES, SIZES):
        cuts = [
            (n, tiling.columns(1, n, size, itemsize, inputs)),
            (size, tiling.rows(n, size, itemsize, inputs)),
            (n, tiling.merge(n, size)),
        ]
        for length, cut in cuts:
            assert all(math.log2(size).is_integer() for size in (cut.lanes, cut.across))
            assert cut.slice * (cut.slices - 1) < length <= cut.slice * cut.slices
            assert cut.warps in (1, 2, 4, 8, 16)
            # Of 255 registers, those that hold values: no more than half.
            held = cut.lanes * cut.across * cut.unroll / (32 * cut.warps)
            assert held <= (64 if cut is not cuts[2][1] else 16)


def test_what_is_worth_a_kernel():
    def worth(*shape, dtype="float32"):
        return tiling.worthwhile(jax.ShapeDtypeStruct(shape, dtype))

    assert worth(256, 64, 56 * 56, dtype="bfloat16")
    assert worth(8192, 256, 1)
    assert not worth(256, 64, 56 * 56)  # may lie channel after channel
    assert worth(8192, 1, 1, 768, dtype="bfloat16")
    assert not worth(32, 64, 8 * 8, dtype="bfloat16")
    assert not worth(31, 2**22, 1)
