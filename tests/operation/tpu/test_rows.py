"""Tests that rows are normalised within the layers' bounds, with derivatives of all orders."""

import functools
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from eqx_norm import LayerNorm, RMSNorm
from eqx_norm._normalise.tpu import kernel, rows
from experiments.common import exact
from tests.compiling import jit
from tests.helpers import bits, normal
from tests.layers import accuracy
from tests.operation.test_residuals import held, of_each

pytestmark = pytest.mark.x32  # no float64


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Takes a CPU for a TPU; Pallas interprets the kernels, with NaN beyond the end of x."""
    monkeypatch.setattr(rows, "_PLATFORM", "cpu")
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Gives blocks 32 rows, so that few values fill many."""
    monkeypatch.setattr(kernel, "_VALUES", 32 * kernel._LANES)


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
    right = (exact.layer_norm if kind is LayerNorm else exact.rms_norm)(batch)
    found = exact.Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))
    errors, bounds = exact.errors(batch, right, found)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


# Of one block; cut along one axis or both, with and without a remainder; axes of size 1.
ONE = [(7,), (1, 1), (16, 130), (2, 3, 1, 4)]
CUT = [(96, 7), (37, 9), (5, 3, 7), (5, 37, 2), (64, 1, 2)]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [*ONE, *CUT], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_against_64_bits(shape, dtype):
    x = 3 + 2 * np.random.default_rng(1).standard_normal(shape)
    check(LayerNorm if len(shape) % 2 else RMSNorm, x.astype(dtype))


@pytest.mark.parametrize("shape", [(8, 7), (8, 1009)], ids=str)
@hypothesis.given(accuracy.seeds)
@hypothesis.settings(
    max_examples=8, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_hard_values(shape, seed):
    random = np.random.default_rng(seed)
    x = accuracy.far_from_zero(random, shape[::-1]).T
    check(LayerNorm, x)
    check(LayerNorm, x, np.ones_like(x))
    for place in (0, random.integers(shape[1])):
        check(LayerNorm, accuracy.with_outlier(random, shape[::-1], place).T)


@pytest.mark.usefixtures("small_blocks")
def test_sums_over_many_blocks_lose_nothing():
    """The largest errors: each of 512 sums is rounded in the same direction."""
    x = np.random.default_rng(0).standard_normal((2**14, 2)).astype(np.float32)
    check(LayerNorm, x, np.full_like(x, 0.1))


def test_constant_rows_give_the_bias_to_the_bit():
    x = np.array([1e-3, 0.1, 1 / 3, 300.0, 65504.0, -7.0], np.float32)[:, None].repeat(9, 1)
    y = jit(mapped(LayerNorm, (6, 9)))(normal(0, (9,)), bias := normal(1, (9,)), x)
    assert bits(y) == bits(jnp.broadcast_to(bias, (6, 9)))


EVERY = (0, 1, 2)


def squares(f):
    return lambda *a: jnp.sum(f(*a) ** 2)


def each(f, *axes):
    return lambda *a: jax.vmap(f, axes)(*a)


TRANSFORMS = {
    "reverse": lambda f: jax.jacrev(f, EVERY),
    "reverse in the bias": lambda f: jax.jacrev(f, 1),
    "forward": lambda f: jax.jacfwd(f, EVERY),
    "hessian": lambda f: jax.hessian(squares(f), EVERY),
    "penalty": lambda f: jax.grad(squares(jax.grad(squares(f), 2)), EVERY),
    "weights that differ": lambda f: jax.grad(
        squares(lambda w, *a: each(f, 0, None, None)(w * w[:, None], *a)), EVERY
    ),
    "biases that differ": lambda f: jax.grad(
        squares(lambda w, b, x: each(f, None, 0, None)(w, b * b[:, None], x)), EVERY
    ),
    "gradients of each": lambda f: each(jax.grad(squares(f), EVERY), None, None, 0),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_derivatives(kind, transform):
    random = np.random.default_rng(0)
    given = [random.normal(size=n) for n in (4, 4, (2, 3, 4))]
    given[2] = given[2] if transform == "gradients of each" else given[2][0]

    def of(implementation):
        return jit(TRANSFORMS[transform](mapped(kind, (3, 4), implementation=implementation)))

    found = of("pallas")(*(jnp.asarray(v, jnp.float32) for v in given))
    with jax.enable_x64(True):
        right = of("auto")(*map(jnp.asarray, given))
    for a, b in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def test_x_itself_is_kept_and_vectors():
    kept = held(LayerNorm(8, implementation="pallas"), of_each, x := normal(0, (5, 8)))
    vectors = [leaf for leaf in kept if leaf is not x]
    assert len(vectors) == len(kept) - 1
    assert max(vector.size for vector in vectors) <= 8


@pytest.mark.parametrize(("shape", "ndim"), [((5, 2, 3), 2), ((5,), 0)], ids=str)
def test_rows_of_several_axes_or_none(shape, ndim):
    arrays = [normal(0, shape[len(shape) - ndim :])] * 2 + [normal(1, shape)]
    y, right = (jit(mapped(LayerNorm, shape, ndim, how))(*arrays) for how in ("pallas", "xla"))
    np.testing.assert_allclose(y, right, atol=1e-6)
