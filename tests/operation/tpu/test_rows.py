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


def mapped(kind, shape, ndim=1, implementation: Any = "pallas", **options):
    """Returns the layer of the last `ndim` axes as a function of weight, bias and x."""

    def f(weight, bias, x):
        mapped = len(shape) - ndim
        layer = kind(shape[mapped:], implementation=implementation, **options)
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        for _ in range(mapped):
            layer = jax.vmap(layer)
        return layer(x)

    return f


# Of one block; cut along one axis or both, with and without a remainder; axes of size 1.
ONE = [(7,), (1, 1), (5, 3), (16, 130), (2, 3, 1, 4)]
CUT = [(96, 7), (37, 9), (5, 3, 7), (5, 37, 2), (64, 1, 2)]
FLOAT, HALF = np.float32, jnp.bfloat16


@functools.partial(jax.jit, static_argnames="kind")
def train(dy, *arrays, kind):
    """Returns y, and the gradients of weight, bias and x."""
    y, pull_back = jax.vjp(mapped(kind, dy.shape), *arrays)
    return y, *pull_back(dy)


def check(kind, x, dy, weight, bias, bounds=accuracy.BOUNDS):
    """Holds output and gradients to their bounds."""
    y, dweight, dbias, dx = train(dy, weight, bias, x, kind=kind)
    assert y.dtype == dx.dtype == x.dtype
    x, dy, y, dx = (np.asarray(v).reshape(-1, x.shape[-1]) for v in (x, dy, y, dx))
    batch = exact.Batch(x, dy, weight, bias)
    right = (exact.layer_norm if kind is LayerNorm else exact.rms_norm)(batch)
    found = exact.Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))
    errors = exact.errors(batch, right, found)._asdict()
    over = {name: errors[name] for name in bounds if errors[name] > bounds[name]}
    assert not over, over


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        *((LayerNorm, FLOAT, shape) for shape in [*ONE, *CUT]),
        *((kind, HALF, shape) for kind in (LayerNorm, RMSNorm) for shape in CUT[1:4]),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_against_64_bits(kind, shape, dtype):
    random = np.random.default_rng(0)
    x = (3 + 2 * random.standard_normal(shape)).astype(dtype)
    check(kind, x, *drawn(random, shape, dtype))


def drawn(random, shape, dtype: Any = np.float32):
    """Returns a gradient of y, a weight and a bias."""
    weight, bias = random.uniform(0.5, 1.5, (2, shape[-1])).astype(np.float32)
    return random.standard_normal(shape).astype(dtype), weight, bias


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


class Tanh(eqx.Module):
    slope: Any

    def __call__(self, u):
        return jnp.tanh(self.slope * u)


# Computed in the kernel; after it, for Mosaic has no expm1; after it, with an array.
ACTIVATIONS = {
    "none": lambda slope: None,
    "silu": lambda slope: jax.nn.silu,
    "elu": lambda slope: jax.nn.elu,
    "tanh": Tanh,
}
EVERY = (0, 1, 2, 3)


def squares(f):
    return lambda *a: jnp.sum(f(*a) ** 2)


def penalty(f):
    return jax.grad(lambda *a: squares(jax.grad(squares(f), 3))(*a), EVERY)


TRANSFORMS = {
    "reverse": lambda f: jax.jacrev(f, EVERY),
    "reverse in x": lambda f: jax.jacrev(f, 3),
    "reverse in the bias": lambda f: jax.jacrev(f, 1),
    "forward": lambda f: jax.jacfwd(f, EVERY),
    "hessian": lambda f: jax.hessian(squares(f), EVERY),
    "penalty": penalty,
    "remat": lambda f: jax.checkpoint(jax.jacrev(f, EVERY)),
    "weights that differ": lambda f: jax.vmap(
        lambda w, *a: jax.vmap(jax.grad(squares(f), EVERY), (0, None, None, None))(
            jnp.stack([w, 2 * w]), *a
        ),
        (None, None, None, 0),
    ),
    "biases that differ": lambda f: jax.grad(
        squares(lambda w, b, *a: jax.vmap(f, (None, 0, None, None))(w, b * b[:, None], *a)),
        EVERY,
    ),
}


CASES = [
    *((LayerNorm, "silu", transform) for transform in TRANSFORMS),
    *((LayerNorm, name, "reverse") for name in ("none", "elu", "tanh")),
    *((LayerNorm, name, "penalty") for name in ("none", "elu", "tanh")),
    *((RMSNorm, "silu", transform) for transform in ("reverse", "forward", "penalty")),
]


@pytest.mark.parametrize(("kind", "name", "transform"), CASES)
def test_derivatives(kind, name, transform):
    """Differentiates in weight, bias, a parameter of the activation, and x."""
    random = np.random.default_rng(0)
    given = [random.normal(size=n) for n in (4, 4, (), (3, 4))]
    if transform == "weights that differ":
        given[-1] = random.normal(size=(2, 3, 4))

    def of(implementation):
        def f(weight, bias, slope, x):
            how: Any = {"implementation": implementation}
            layer = mapped(kind, (3, 4), activation=ACTIVATIONS[name](slope), **how)
            return layer(weight, bias, x)

        return jit(TRANSFORMS[transform](f))

    found = of("pallas")(*(jnp.asarray(v, jnp.float32) for v in given))
    with jax.enable_x64(True):
        right = of("auto")(*map(jnp.asarray, given))
    for a, b in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("name", ["none", "silu", "elu"])
def test_x_itself_is_kept_and_vectors(name):
    options: Any = {"activation": ACTIVATIONS[name](1.0), "implementation": "pallas"}
    x = normal(0, (5, 8))
    kept = held(LayerNorm(8, **options), of_each, x)
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
