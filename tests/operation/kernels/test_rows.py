"""Tests that row kernels stay within the layers' bounds, with derivatives of all orders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm._normalise.formulas.row_norm import RowNorm
from eqx_norm._normalise.kernels import gpu_rows, tile, tpu_rows
from experiments.common import exact
from experiments.common.exact import standardised
from tests.compiling import jit
from tests.helpers import bits, normal, y_and_gradients
from tests.layers import accuracy
from tests.layers.norms import with_parameters
from tests.operation.derivatives import BASIC, REPEATED, gradient, gradient_of_gradient

from .interpreted import take_the_cpu_for

pytestmark = pytest.mark.x32  # kernels serve no float64
# Kernels are interpreted: what XLA:CPU makes of that is not what a GPU or TPU runs.
UNOPTIMISED = True


@pytest.fixture(params=["cuda", "tpu"])
def platform(request, monkeypatch):
    take_the_cpu_for(request.param, monkeypatch)
    return request.param


@pytest.fixture
def on_a_gpu(monkeypatch):
    take_the_cpu_for("cuda", monkeypatch)


def mapped(kind, shape, ndim=1, activation=None):
    """Returns a layer over the last `ndim` axes as a function of weight, bias and x."""

    def f(weight, bias, x):
        layer = kind(shape[-ndim:], implementation="pallas", activation=activation)
        layer = with_parameters(layer, weight, bias)
        for _ in shape[ndim:]:
            layer = jax.vmap(layer)
        return layer(x)

    return f


def train(f, dy, *arrays):
    """Returns y, and the gradients of all arrays."""

    # Only a new function is traced with constants that a test has changed.
    return jax.jit(lambda *arrays: y_and_gradients(f, *arrays))(dy, *arrays)


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
    check_errors(batch, expected, y, dx, dweight, dbias)


def check_errors(batch, expected, y, dx, dweight=None, dbias=None):
    answer = jax.tree.map(np.asarray, exact.Answer(y, None, dx, dweight, dbias))
    errors, bounds = exact.errors(batch, expected, answer)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


# TPU: axes of size 1; one block; blocks along one axis or both, with a remainder.
# GPU: one row, and fewer rows than a block; an overlapping last block; tiles of one warp and of
# four warps, one and several along a row.
SHAPES = {
    "tpu": [(1, 1), (16, 130), (2, 3, 1, 4), (300, 9), (37, 3, 7), (5, 300, 2)],
    "cuda": [(300, 24), (64,), (37, 3, 8), (3, 2048)],
}
KINDS = [(LayerNorm, np.float32), (LayerNorm, jnp.bfloat16), (RMSNorm, jnp.bfloat16)]
CASES = [
    (platform, shape, *KINDS[i % len(KINDS)])
    for platform, shapes in SHAPES.items()
    for i, shape in enumerate(shapes)
]


@pytest.mark.filterwarnings("ignore:.* hold one value per group")
@pytest.mark.parametrize(
    ("platform", "shape", "kind", "dtype"),
    [*CASES, ("cuda", (9, 768), LayerNorm, np.float16)],
    indirect=["platform"],
)
def test_row_kernels_agree_with_extended_precision(platform, shape, kind, dtype):
    check(kind, (3 + 2 * np.random.default_rng(1).standard_normal(shape)).astype(dtype))


@pytest.mark.parametrize("size", [8, pytest.param(1024, marks=pytest.mark.long)])
def test_row_kernels_of_means_far_from_zero_and_outliers(platform, size):
    random = np.random.default_rng(0)
    x = accuracy.far_from_zero(random, (size, 8)).T
    check(LayerNorm, x)
    check(LayerNorm, x, np.ones_like(x))
    first, other = (accuracy.with_outlier(random, (size, 4), at) for at in (0, size // 2))
    check(LayerNorm, np.concatenate([first, other], 1).T)


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


def jacobian(f, primals, tangents):
    return jax.jacrev(f, (0, 1, 2))(*primals)


# The rules of derivatives are the same for both platforms; mapped kernels are not.
TRANSFORMS = {
    "cuda": (*BASIC, gradient_of_gradient, partly_shared),
    "tpu": (*REPEATED, jacobian),
}


def test_derivatives_of_row_kernels(platform):
    """Tests norms of examples with several axes."""
    kind = LayerNorm if platform == "cuda" else RMSNorm
    random = np.random.default_rng(0)
    arrays = [[random.normal(size=n) for n in ((2, 2), (2, 2), (3, 2, 2))] for _ in range(2)]

    def written_out(weight, bias, x):
        u, _ = standardised(x, (-2, -1), centred=kind is LayerNorm)
        return jax.nn.silu(u * weight + bias)

    def derived(f, dtype):
        operands, tangents = jax.tree.map(lambda v: jnp.asarray(v, dtype), arrays)
        compiled = jit(lambda *at: [t(f, *at) for t in TRANSFORMS[platform]])
        return jax.tree.leaves(compiled(operands, tangents))

    layer = mapped(kind, (3, 2, 2), 2, activation=jax.nn.silu)
    actual = derived(layer, jnp.float32)
    with jax.enable_x64(True):
        expected = derived(written_out, jnp.float64)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


# Several groups per block; several blocks per group; channels of several values; a number of
# groups coprime to the rows of a tile; no weights; one group.
GROUPED = [
    (functools.partial(GroupNorm, 32, 256), (256,), jnp.bfloat16),
    (functools.partial(InstanceNorm, 96, affine=True), (96, 8, 8), jnp.float32),
    (functools.partial(GroupNorm, 4, 8), (8, 4, 6), jnp.bfloat16),
    (functools.partial(GroupNorm, 3, 6), (6, 4, 4), jnp.float32),
    (functools.partial(InstanceNorm, 3), (3, 4, 4), jnp.bfloat16),
    (functools.partial(InstanceNorm, 1, affine=True), (1, 4, 4), jnp.float32),
]


@pytest.mark.parametrize(("kind", "shape", "dtype"), GROUPED)
def test_row_kernel_normalises_groups(on_a_gpu, kind, shape, dtype):
    random = np.random.default_rng(0)
    layer = kind(implementation="pallas")
    x, dy = (3 + 2 * random.standard_normal((2, 5, *shape))).astype(dtype)
    weight, bias = random.uniform(0.5, 1.5, (2, shape[0])).astype(np.float32)
    given = () if layer.weight is None else (weight, bias)

    def f(x, *affine):
        return jax.vmap(with_parameters(layer, *affine) if affine else layer)(x)

    y, dx, *sums = train(f, dy, x, *given)
    batch = exact.Batch(x, dy, *given or (np.ones_like(weight), np.zeros_like(bias)))
    check_errors(batch, exact.group_norm(batch, layer.groups), y, dx, *sums)


def test_error_for_more_rows_than_a_kernel_can_count():
    x = jax.ShapeDtypeStruct((2**31, 8), jnp.dtype("bfloat16"))
    with pytest.raises(ValueError, match="more rows than a kernel can count"):
        gpu_rows.Grid.of(x, 1, (1, 4), lambda _: 64, 16)


each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
each_length = pytest.mark.parametrize("length", [192, 768, 1280, 4096])
NUMBERS = 1, 7, 64, 1000, 65536  # of rows


@each_dtype
@each_length
def test_gpu_tile_depends_on_the_length_alone(on_a_gpu, monkeypatch, length, dtype):
    grids, of = [], gpu_rows.Grid.of
    monkeypatch.setattr(gpu_rows.Grid, "of", lambda *at: grids.append(of(*at)) or grids[-1])
    norm, weight = RowNorm(1e-5, True), jax.ShapeDtypeStruct((1, length), jnp.float32)
    for rows in NUMBERS:
        x = jax.ShapeDtypeStruct((rows, 1, length), jnp.dtype(dtype))
        jax.eval_shape(functools.partial(gpu_rows.forward, norm=norm), x, weight, weight)
        jax.eval_shape(functools.partial(gpu_rows.backward, norm=norm), x, x, weight, weight)
    forward, backward = grids[::2], grids[1::2]
    assert len(forward) == len(backward) == len(NUMBERS)
    assert len({*forward}) == len({*backward}) == 1


@each_dtype
@each_length
def test_tpu_blocks_hold_whole_rows(length, dtype):
    """Tests that no sum of a row is cut; the number of rows in a block depends on that in x."""
    blocks = []
    for rows in NUMBERS:
        x = jax.ShapeDtypeStruct((rows, 1, length), jnp.dtype(dtype))
        jax.eval_shape(lambda x: blocks.append(tpu_rows._blocks(x)[1]), x)
    assert [block[-1] for block in blocks] == [length] * len(NUMBERS)


@each_dtype
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
