"""Tests that rows are normalised within the layers' bounds, with derivatives of all orders."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from eqx_norm import LayerNorm, RMSNorm
from eqx_norm._normalise.tpu import kernel, rows
from tests import exact
from tests.compiling import jit
from tests.helpers import bits, normal
from tests.layers import accuracy
from tests.operation.derivatives import ENSEMBLES, FIRST_ORDER, HIGHER, gradient
from tests.operation.test_residuals import held

pytestmark = pytest.mark.x32  # no float64


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Takes a CPU for a TPU; Pallas interprets the kernels, with NaN beyond the end of x.
    Blocks have 256 short rows."""
    monkeypatch.setattr(rows, "_PLATFORM", "cpu")
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(kernel, "_VALUES", 256 * kernel._LANES)


def mapped(kind, shape, ndim=1, implementation: Any = "pallas"):
    """Returns the layer of the last `ndim` axes as a function of weight, bias and x."""

    def f(weight, bias, x):
        layer = kind(shape[len(shape) - ndim :], implementation=implementation)
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        for _ in shape[ndim:]:
            layer = jax.vmap(layer)
        return layer(x)

    return f


@functools.partial(jax.jit, static_argnames="kind")
def train(dy, *arrays, kind):
    """Returns y, and the gradients of weight, bias and x."""
    y, pull_back = jax.vjp(mapped(kind, dy.shape), *arrays)
    return y, *pull_back(dy)


def check(kind, x, dy=None):
    """Holds output and gradients to their bounds."""
    random = np.random.default_rng(0)
    weight, bias = random.uniform(0.5, 1.5, (2, x.shape[-1])).astype(np.float32)
    dy = random.standard_normal(x.shape).astype(x.dtype) if dy is None else dy
    y, dweight, dbias, dx = train(dy, weight, bias, x, kind=kind)
    assert y.dtype == dx.dtype == x.dtype
    x, dy, y, dx = (np.asarray(v).reshape(-1, x.shape[-1]) for v in (x, dy, y, dx))
    batch = exact.Batch(x, dy, weight, bias)
    expected = exact.layer_norm(batch, centred=kind is LayerNorm)
    answer = exact.Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))
    errors, bounds = exact.errors(batch, expected, answer)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


# Of one block; cut along one axis or both, with and without a remainder; axes of size 1.
SHAPES = [(7,), (1, 1), (16, 130), (2, 3, 1, 4), (300, 9), (37, 3, 7), (5, 300, 2), (512, 1, 2)]
of_one_value = pytest.mark.filterwarnings("ignore:.* hold one value per group")
KINDS = (LayerNorm, np.float32), (LayerNorm, jnp.bfloat16), (RMSNorm, jnp.bfloat16)


@of_one_value
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_64_bits(kind, dtype, shape):
    x = 3 + 2 * np.random.default_rng(1).standard_normal(shape)
    check(kind, x.astype(dtype))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [7, 1009])
def test_hard_values(size, seed):
    random = np.random.default_rng(seed)
    x = accuracy.far_from_zero(random, (size, 8)).T
    check(LayerNorm, x)
    check(LayerNorm, x, np.ones_like(x))
    for place in (0, random.integers(size)):
        check(LayerNorm, accuracy.with_outlier(random, (size, 8), place).T)


def test_sums_over_many_blocks_lose_nothing():
    """The largest errors: each of 512 sums is rounded in the same direction."""
    x = np.random.default_rng(0).standard_normal((2**17, 2)).astype(np.float32)
    check(LayerNorm, x, np.full_like(x, 0.1))


def test_constant_rows_give_the_bias_to_the_bit():
    x = np.array([1e-3, 0.1, 1 / 3, 300.0, 65504.0, -7.0], np.float32)[:, None].repeat(9, 1)
    y = jit(mapped(LayerNorm, (6, 9)))(normal(0, (9,)), bias := normal(1, (9,)), x)
    assert bits(y) == bits(jnp.broadcast_to(bias, (6, 9)))


def partly_shared(f, primals, tangents):
    """Returns gradients where weights differ but biases do not, and the other way round."""
    weight, bias, x = primals
    first = jax.vmap(f, (0, None, None)), (jnp.stack([weight, 2 * weight]), bias, x)
    second = jax.vmap(f, (None, 0, None)), (weight, jnp.stack([bias, 2 * bias]), x)
    return [gradient(*pair, tangents) for pair in (first, second)]


JACOBIAN = lambda f, primals, tangents: jax.jacrev(f, (0, 1, 2))(*primals)  # noqa: E731
TRANSFORMS = *FIRST_ORDER, *HIGHER[:2], *ENSEMBLES, partly_shared, JACOBIAN


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_derivatives(kind, transform):
    random = np.random.default_rng(0)
    arrays = [[random.normal(size=n) for n in (4, 4, (3, 4))] for _ in range(2)]

    def derived(implementation, dtype):
        f = mapped(kind, (3, 4), implementation=implementation)
        operands, tangents = jax.tree.map(lambda v: jnp.asarray(v, dtype), arrays)
        return jax.tree.leaves(jit(functools.partial(transform, f))(operands, tangents))

    actual = derived("pallas", jnp.float32)
    with jax.enable_x64(True):
        expected = derived("auto", jnp.float64)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def test_x_itself_is_kept_and_vectors():
    layer, x = LayerNorm(8, implementation="pallas"), normal(0, (5, 8))
    kept = held(layer, lambda layer, x: jax.vmap(layer)(x), x)
    vectors = [leaf for leaf in kept if leaf is not x]
    assert len(vectors) == len(kept) - 1
    assert max(vector.size for vector in vectors) <= 8


@of_one_value
@pytest.mark.parametrize(("shape", "ndim"), [((5, 2, 3), 2), ((5,), 0)], ids=str)
def test_rows_of_several_axes_or_none(shape, ndim):
    arrays = [normal(0, shape[len(shape) - ndim :])] * 2 + [normal(1, shape)]
    y, expected = (
        jit(mapped(LayerNorm, shape, ndim, name))(*arrays) for name in ("pallas", "xla")
    )
    np.testing.assert_allclose(y, expected, atol=1e-6)
