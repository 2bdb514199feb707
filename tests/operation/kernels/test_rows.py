"""Tests that row kernels stay within the layers' bounds, with derivatives of all orders."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm._normalise.kernels import gpu_rows, tile
from tests import exact
from tests.compiling import jit
from tests.helpers import bits, normal
from tests.layers import accuracy
from tests.operation.derivatives import ENSEMBLES, FIRST_ORDER, HIGHER, gradient
from tests.operation.test_residuals import held

from .interpreted import take_the_cpu_for

pytestmark = pytest.mark.x32  # kernels serve no float64


@pytest.fixture(params=["cuda", "tpu"])
def platform(request, monkeypatch):
    take_the_cpu_for(request.param, monkeypatch)
    return request.param


@pytest.fixture
def on_a_gpu(monkeypatch):
    take_the_cpu_for("cuda", monkeypatch)


def mapped(kind, shape, ndim=1, implementation: Any = "pallas", activation=None):
    """Returns a layer over the last `ndim` axes as a function of weight, bias and x."""

    def f(weight, bias, x):
        how: Any = {"implementation": implementation, "activation": activation}
        layer = kind(shape[len(shape) - ndim :], **how)
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        for _ in shape[ndim:]:
            layer = jax.vmap(layer)
        return layer(x)

    return f


def train(f, dy, *arrays):
    """Returns y, and the gradients of all arrays."""

    def step(dy, *arrays):
        y, pull_back = jax.vjp(f, *arrays)
        return y, *pull_back(dy)

    # Only a new function is traced with constants that a test has changed.
    return jax.jit(step)(dy, *arrays)


def check(kind, x, dy=None):
    """Checks output and gradients against their bounds."""
    random = np.random.default_rng(0)
    weight, bias = random.uniform(0.5, 1.5, (2, x.shape[-1])).astype(np.float32)
    dy = random.standard_normal(x.shape).astype(x.dtype) if dy is None else dy
    y, dweight, dbias, dx = train(mapped(kind, x.shape), dy, weight, bias, x)
    assert y.dtype == dx.dtype == x.dtype
    x, dy, y, dx = (np.asarray(v).reshape(-1, x.shape[-1]) for v in (x, dy, y, dx))
    batch = exact.Batch(x, dy, weight, bias)
    expected = exact.layer_norm(batch, centred=kind is LayerNorm)
    answer = exact.Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))
    errors, bounds = exact.errors(batch, expected, answer)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


# TPU: one block; blocks along one axis or both, with and without a remainder; axes of size 1.
# GPU: fewer rows than a block; an overlapping last block; tiles of one warp and of four warps,
# one and several along a row.
SHAPES = {
    "tpu": [(7,), (1, 1), (16, 130), (2, 3, 1, 4), (300, 9), (37, 3, 7), (5, 300, 2)],
    "cuda": [(64,), (1, 8), (37, 3, 8), (19, 96), (300, 24), (9, 768), (2, 1152), (3, 2048)],
}
of_one_value = pytest.mark.filterwarnings("ignore:.* hold one value per group")
KINDS = (LayerNorm, np.float32), (LayerNorm, jnp.bfloat16), (RMSNorm, jnp.bfloat16)


@of_one_value
@pytest.mark.parametrize("at", range(8))
def test_row_kernels_agree_with_extended_precision(platform, at):
    shapes = SHAPES[platform]
    x = 3 + 2 * np.random.default_rng(1).standard_normal(shapes[at % len(shapes)])
    for kind, dtype in (KINDS[0], KINDS[1 + at % 2]):
        check(kind, x.astype(dtype))


def test_row_kernel_of_float16_on_a_gpu(on_a_gpu):
    check(LayerNorm, np.random.default_rng(1).standard_normal((37, 64)).astype(np.float16))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [8, pytest.param(1024, marks=pytest.mark.long)])
def test_row_kernels_of_means_far_from_zero_and_outliers(platform, size, seed):
    random = np.random.default_rng(seed)
    x = accuracy.far_from_zero(random, (size, 8)).T
    check(LayerNorm, x)
    check(LayerNorm, x, np.ones_like(x))
    for place in (0, random.integers(size)):
        check(LayerNorm, accuracy.with_outlier(random, (size, 8), place).T)


def test_row_kernel_sums_over_many_blocks(platform):
    """Tests the largest errors: each of 512 sums is rounded in the same direction."""
    length = 2 if platform == "tpu" else 4  # the shortest row that a kernel serves
    x = np.random.default_rng(0).standard_normal((2**17, length)).astype(np.float32)
    check(LayerNorm, x, np.full_like(x, 0.1))


def test_constant_rows_give_the_bias_to_the_bit(platform):
    x = np.array([1e-3, 0.1, 1 / 3, 300.0, 65504.0, -7.0], np.float32)[:, None].repeat(24, 1)
    f = mapped(LayerNorm, (6, 24))
    y, *_ = train(f, np.ones_like(x), normal(0, (24,)), bias := normal(1, (24,)), x)
    assert bits(y) == bits(jnp.broadcast_to(bias, (6, 24)))


def partly_shared(f, primals, tangents):
    """Returns gradients of ensembles that share the bias, and that share the weight."""
    weight, bias, x = primals
    first = jax.vmap(f, (0, None, None)), (jnp.stack([weight, 2 * weight]), bias, x)
    second = jax.vmap(f, (None, 0, None)), (weight, jnp.stack([bias, 2 * bias]), x)
    return [gradient(*pair, tangents) for pair in (first, second)]


JACOBIAN = lambda f, primals, tangents: jax.jacrev(f, (0, 1, 2))(*primals)  # noqa: E731
TRANSFORMS = *FIRST_ORDER, *HIGHER[:2], *ENSEMBLES, partly_shared, JACOBIAN


@pytest.mark.parametrize(
    "activation", [None, pytest.param(jax.nn.silu, marks=pytest.mark.long)]
)
def test_derivatives_of_row_kernels(platform, activation):
    # Each platform tests both kinds and both activations.
    kind = LayerNorm if (platform == "cuda") == (activation is None) else RMSNorm
    random = np.random.default_rng(0)
    arrays = [[random.normal(size=n) for n in (4, 4, (3, 4))] for _ in range(2)]

    def derived(implementation, dtype):
        f = mapped(kind, (3, 4), 1, implementation, activation)
        operands, tangents = jax.tree.map(lambda v: jnp.asarray(v, dtype), arrays)
        return jit(lambda *at: [transform(f, *at) for transform in TRANSFORMS])(
            operands, tangents
        )

    actual = jax.tree.leaves(derived("pallas", jnp.float32))
    with jax.enable_x64(True):
        expected = jax.tree.leaves(derived("auto", jnp.float64))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def test_residuals_of_row_kernels_are_x_itself_and_vectors(platform):
    layer, x = LayerNorm(8, implementation="pallas"), normal(0, (5, 8))
    kept = held(layer, lambda layer, x: jax.vmap(layer)(x), x)
    vectors = [leaf for leaf in kept if leaf is not x]
    assert len(vectors) == len(kept) - 1
    assert max(vector.size for vector in vectors) <= 8


@of_one_value
@pytest.mark.parametrize(("shape", "ndim"), [((5, 2, 4), 2), ((5,), 0)], ids=str)
def test_row_kernels_over_several_axes_or_none(platform, shape, ndim):
    arrays = [normal(0, shape[len(shape) - ndim :])] * 2 + [normal(1, shape)]
    y, expected = (
        jax.jit(mapped(LayerNorm, shape, ndim, name))(*arrays) for name in ("pallas", "xla")
    )
    np.testing.assert_allclose(y, expected, atol=1e-6)


# Several groups per block; several blocks per group; channels of several values; a number of
# groups coprime to the rows of a tile; no weights; one group.
GROUPED = [
    (functools.partial(GroupNorm, 32, 256), (256,)),
    (functools.partial(InstanceNorm, 96, affine=True), (96, 8, 8)),
    (functools.partial(GroupNorm, 4, 8), (8, 4, 6)),
    (functools.partial(GroupNorm, 3, 6), (6, 4, 4)),
    (functools.partial(InstanceNorm, 3), (3, 4, 4)),
    (functools.partial(InstanceNorm, 1, affine=True), (1, 4, 4)),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("kind", "shape"), GROUPED)
def test_row_kernel_normalises_groups(on_a_gpu, kind, shape, dtype):
    random = np.random.default_rng(0)
    layer = kind(implementation="pallas")
    x, dy = (3 + 2 * random.standard_normal((2, 5, *shape))).astype(dtype)
    weight, bias = random.uniform(0.5, 1.5, (2, shape[0])).astype(np.float32)
    given = () if layer.weight is None else (weight, bias)

    def f(x, *affine):
        made = layer
        if affine:
            made = eqx.tree_at(lambda m: (m.weight, m.bias), layer, affine)
        return jax.vmap(made)(x)

    y, dx, *sums = map(np.asarray, train(f, dy, x, *given))
    batch = exact.Batch(x, dy, *given or (np.ones_like(weight), np.zeros_like(bias)))
    expected = exact.group_norm(batch, layer.groups)
    answer = exact.Answer(y, None, dx, *sums or (None, None))
    errors, bounds = exact.errors(batch, expected, answer)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


def test_error_for_more_rows_than_a_kernel_can_count():
    x = jax.ShapeDtypeStruct((2**31, 8), jnp.dtype("bfloat16"))
    with pytest.raises(ValueError, match="more rows than a kernel can count"):
        gpu_rows.Grid.of(x, 1, (1, 4), lambda _: 64, 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths_that_row_kernels_serve(dtype):
    """Tests the lengths that the error names, and the limit of values per thread."""
    for odd in range(1, 18 if dtype == "bfloat16" else 36, 2):
        for n in (odd * 2**power for power in range(3, 14)):
            x = jax.ShapeDtypeStruct((4096, n), jnp.dtype(dtype))
            ways = [((1, 4), 64)] * (n <= 8192) + [((4,), 36)] * (n <= 4608)
            for across, most in ways:
                grid = gpu_rows.Grid.of(x, 1, across, lambda _, most=most: most, 16)
                assert n % grid.tile.columns == 0
                assert grid.rows * n <= most * tile.THREADS
