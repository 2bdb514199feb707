"""Tests that rows are normalised within the layers' bounds, with derivatives of all orders."""

import functools
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm, RMSNorm
from experiments.common import exact
from tests.compiling import jit
from tests.helpers import bits, normal
from tests.layers import accuracy
from tests.operation.test_residuals import held, of_each

pytestmark = [pytest.mark.x32, pytest.mark.usefixtures("interpreted")]  # no float64


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


def check(kind, x, dy, weight, bias):
    """Holds output and gradients to their bounds."""
    y, dweight, dbias, dx = train(dy, weight, bias, x, kind=kind)
    assert y.dtype == dx.dtype == x.dtype
    x, dy, y, dx = (np.asarray(v).reshape(-1, x.shape[-1]) for v in (x, dy, y, dx))
    batch = exact.Batch(x, dy, weight, bias)
    right = (exact.layer_norm if kind is LayerNorm else exact.rms_norm)(batch)
    found = exact.Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))
    errors, bounds = exact.errors(batch, right, found)._asdict(), accuracy.BOUNDS
    assert not {name: errors[name] for name in bounds if errors[name] > bounds[name]}


def drawn(random, shape, dtype: Any = np.float32):
    """Returns a gradient of y, a weight and a bias."""
    weight, bias = random.uniform(0.5, 1.5, (2, shape[-1])).astype(np.float32)
    return random.standard_normal(shape).astype(dtype), weight, bias


# Of one block; cut along one axis or both, with and without a remainder; axes of size 1.
ONE = [(7,), (1, 1), (5, 3), (16, 130), (2, 3, 1, 4)]
CUT = [(96, 7), (37, 9), (5, 3, 7), (5, 37, 2), (64, 1, 2)]
CASES = [
    *((LayerNorm, np.float32, shape) for shape in [*ONE, *CUT]),
    *((kind, jnp.bfloat16, shape) for kind in (LayerNorm, RMSNorm) for shape in CUT[1:4]),
]


@pytest.mark.parametrize(("kind", "dtype", "shape"), CASES)
@pytest.mark.usefixtures("small_blocks")
def test_against_64_bits(kind, shape, dtype):
    random = np.random.default_rng(0)
    x = (3 + 2 * random.standard_normal(shape)).astype(dtype)
    check(kind, x, *drawn(random, shape, dtype))


@pytest.mark.parametrize("shape", [(8, 7), (8, 1009)], ids=str)
@hypothesis.given(accuracy.seeds)
@hypothesis.settings(
    max_examples=8, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_hard_values(shape, seed):
    random = np.random.default_rng(seed)
    x = accuracy.far_from_zero(random, shape[::-1]).T
    dy, weight, bias = drawn(random, shape)
    check(LayerNorm, x, dy, weight, bias)
    check(LayerNorm, x, np.ones_like(x), np.ones_like(weight), bias)
    for place in (0, random.integers(shape[1])):
        outlier = accuracy.with_outlier(random, shape[::-1], place).T
        check(LayerNorm, outlier, dy, np.ones_like(weight), np.zeros_like(bias))


def test_constant_rows_give_the_bias_to_the_bit():
    constants = np.array([1e-3, 0.1, 1 / 3, 300.0, 65504.0, -7.0], np.float32)[:, None]
    weight, bias = normal(0, (9,)), normal(1, (9,))
    y = jit(mapped(LayerNorm, (6, 9)))(weight, bias, jnp.broadcast_to(constants, (6, 9)))
    assert bits(y) == bits(jnp.broadcast_to(bias, (6, 9)))


@pytest.mark.usefixtures("small_blocks")
def test_sums_over_many_blocks_lose_nothing():
    """The largest errors: each of 512 sums is rounded in the same direction."""
    random, shape = np.random.default_rng(0), (2**14, 2)
    x, dy = random.standard_normal(shape).astype(np.float32), np.full(shape, 0.1, np.float32)
    check(LayerNorm, x, dy, *drawn(random, shape)[1:])


EVERY = (0, 1, 2)


def squares(f):
    return lambda *a: jnp.sum(f(*a) ** 2)


def each(f, *axes):
    return lambda *a: jax.vmap(f, axes)(*a)


# Each mapped over three weights, biases or x, as the name says.
TRANSFORMS = {
    "reverse": lambda f: jax.jacrev(f, EVERY),
    "reverse in x": lambda f: jax.jacrev(f, 2),
    "reverse in the bias": lambda f: jax.jacrev(f, 1),
    "forward": lambda f: jax.jacfwd(f, EVERY),
    "hessian": lambda f: jax.hessian(squares(f), EVERY),
    "penalty": lambda f: jax.grad(squares(jax.grad(squares(f), 2)), EVERY),
    "remat": lambda f: jax.checkpoint(jax.jacrev(f, EVERY)),
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
    shape = (2, 3, 4) if transform == "gradients of each" else (3, 4)
    given = [random.normal(size=n) for n in (4, 4, shape)]

    def of(implementation):
        return jit(TRANSFORMS[transform](mapped(kind, (3, 4), implementation=implementation)))

    found = of("pallas")(*(jnp.asarray(v, jnp.float32) for v in given))
    with jax.enable_x64(True):
        right = of("auto")(*map(jnp.asarray, given))
    for a, b in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def test_x_itself_is_kept_and_vectors():
    x = normal(0, (5, 8))
    kept = held(LayerNorm(8, implementation="pallas"), of_each, x)
    vectors = [leaf for leaf in kept if leaf is not x]
    assert len(vectors) == len(kept) - 1
    assert max(vector.size for vector in vectors) <= 8


@pytest.mark.parametrize(("shape", "ndim"), [((5, 2, 3), 2), ((5,), 0)], ids=str)
def test_rows_of_several_axes_or_none(shape, ndim):
    x, weight = normal(0, shape), normal(1, shape[len(shape) - ndim :])
    y, right = (
        jit(mapped(LayerNorm, shape, ndim, implementation))(weight, weight, x)
        for implementation in ("pallas", "auto")
    )
    np.testing.assert_allclose(y, right, atol=1e-6)
