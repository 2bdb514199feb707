"""Tests every rule that JAX asks of a primitive on the passes over x, by their formulas.

Here x has two spatial axes, which are flattened when a program is lowered. The interface for
new primitives is the one that JAX may change; this is where it is noticed.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import elementwise, on_cpu, reference
from eqx_norm._normalise.primitives import (
    AFFINE,
    MOMENTS,
    STATISTICS,
    SUMS,
    Static,
    bind,
)
from tests.compiling import jit
from tests.helpers import f32

from .derivatives import compiled, directional, gradient, slope_of_gradient

N, C, H, W = 5, 3, 2, 4
COLUMN = (1, C, 1, 1)
SUMMED = (0, 2, 3)
STATIC = Static(3, C)
RANDOM = np.random.RandomState(0)


def operands(*ensemble):
    """Returns one of each operand, or one for each member of an ensemble."""
    g, x = RANDOM.standard_normal((2, *ensemble, N, C, H, W)) + 1
    # Here the rest of the mean is no smaller than the mean, so that it matters.
    mean, mean_rest, a, b = RANDOM.standard_normal((4, *ensemble, *COLUMN))
    arrays = {"g": g, "x": x, "mean": mean, "mean_rest": mean_rest, "a": a, "b": b}
    mask = jnp.asarray(RANDOM.random((*ensemble, N, 1, H, W)) < 0.6)
    return {name: f32(array) for name, array in arrays.items()} | {"mask": mask}


ONE, SEVERAL = operands(), operands(2)


def activation(u):
    """Is neither 0 nor flat at 0, which is what a masked place must not show."""
    return jax.nn.silu(u) + jnp.cos(u)


def statistics(x, mask=None):
    how = {"static": STATIC, "shape": COLUMN, "names": ()}
    count, mean, m2, mean_rest = bind(STATISTICS, x, mask, **how)
    return count, mean + mean_rest, m2


def moments(x, mask=None):
    wide = x.astype(reference.compute_dtype(x.dtype))
    arrays = [jax.lax.stop_gradient(x), *([] if mask is None else [mask])]
    how = {"static": STATIC, "shape": COLUMN, "names": ()}
    count, mean, m2, mean_rest = bind(STATISTICS, *arrays, **how)
    arrays = (wide, x, mean, mean_rest, m2, count, *arrays[1:])
    mean, m2 = MOMENTS.bind(*arrays, **how, mesh=(), centred=True)
    return mean + mean_rest, m2


def of(primitive, **parameters):
    return lambda *operands: bind(primitive, *operands, static=STATIC, **parameters)


def affine(a, b, x, *centre_and_mask):
    return bind(AFFINE, a, b, x.astype(b.dtype), x, *centre_and_mask, static=STATIC)


def activated(a, b, x, mean, mean_rest, mask=None):
    vectors = [a, b, mean, mean_rest]
    return [elementwise.activated(activation, STATIC, vectors, x.astype(b.dtype), x, mask)]


def right_statistics(x, mask=None):
    mask = jnp.broadcast_to(True if mask is None else mask, x.shape)
    n = mask.sum(SUMMED, dtype=x.dtype, keepdims=True)
    mean = jnp.where(mask, x, 0).sum(SUMMED, keepdims=True) / n
    d = jnp.where(mask, x - mean, 0)
    return n, mean, (d * d).sum(SUMMED, keepdims=True)


def right_sums(g, x, mean, mean_rest, mask=None):
    summands = g, g * (x - mean - mean_rest)
    return tuple(weighed(values, mask).sum(SUMMED, keepdims=True) for values in summands)


def right_affine(a, b, x, mean, mean_rest, mask=None):
    return weighed(a + b * (x - mean - mean_rest), mask)


def right_activated(a, b, x, mean, mean_rest, mask=None):
    u = right_affine(a, b, x, mean, mean_rest)
    return weighed(u / (1 + jnp.exp(-u)) + jnp.cos(u), mask)


def weighed(values, mask):
    return values if mask is None else jnp.where(mask, values, 0)


# What the layers bind, and the formula.
OUTER, INNER = ("g", "x", "mean", "mean_rest"), ("a", "b", "x", "mean", "mean_rest")
DIFFERENTIATED = {
    "moments": (moments, lambda *x: right_statistics(*x)[1:], ("x",)),
    "sums": (of(SUMS, shape=COLUMN, both=True), right_sums, OUTER),
    "the second sum": (
        of(SUMS, shape=COLUMN, both=False),
        lambda *arrays: right_sums(*arrays)[1:],
        OUTER,
    ),
    "affine": (affine, right_affine, INNER),
    "activated": (activated, right_activated, INNER),
}
ALL = {"statistics": (statistics, right_statistics, ("x",))} | DIFFERENTIATED
each = pytest.mark.parametrize(("f", "right", "names"), ALL.values(), ids=ALL)
each_derivative = pytest.mark.parametrize(
    ("f", "right", "names"), DIFFERENTIATED.values(), ids=DIFFERENTIATED
)
with_and_without_mask = pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])


def at(i, tree):
    """Returns the i-th member of an ensemble."""
    return jax.tree.map(lambda array: np.asarray(array)[i], tree)


def named(names, masked):
    return (*names, "mask") if masked else names


def in_float64(right, arrays):
    with jax.enable_x64(True):
        arrays = (jnp.asarray(a, np.float64 if a.dtype != bool else bool) for a in arrays)
        return jax.tree.map(np.asarray, jax.jit(right)(*arrays))


def assert_close(result, right):
    results, rights = jax.tree.leaves(result), jax.tree.leaves(right)
    for a, b in zip(results, rights, strict=True):
        assert a.shape == b.shape
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@each
@with_and_without_mask
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_eager_and_compiled(f, right, names, masked, dtype):
    """Takes x of any precision; where the mask is false, there may be anything."""
    arrays = {name: ONE[name] for name in named(names, masked)}
    arrays["x"] = arrays["x"].astype(dtype)
    expected = in_float64(right, arrays.values())
    for name in {"g", "x"} & arrays.keys() if masked else ():
        arrays[name] = jnp.where(ONE["mask"], arrays[name], jnp.nan)
    for run in (f, jax.jit(f)):
        assert_close(run(*arrays.values()), expected)


@each
@with_and_without_mask
def test_mapped_over_any_of_its_operands(f, right, names, masked):
    names = named(names, masked)
    some_mapped = list(itertools.product((None, 0), repeat=len(names)))[1:]

    def chosen(axes, several):
        pairs = zip(names, axes, strict=True)
        return [(ONE if axis is None else several)[name] for name, axis in pairs]

    @compiled
    def mapped(f, several):
        return [jax.vmap(f, axes)(*chosen(axes, several)) for axes in some_mapped]

    for axes, result in zip(some_mapped, mapped(f, SEVERAL), strict=True):
        for i in range(2):
            expected = in_float64(right, chosen(axes, at(i, SEVERAL)))
            assert_close(at(i, result), expected)


@each
def test_mapped_twice_and_over_the_last_axis(f, right, names):
    arrays = [SEVERAL[name] for name in named(names, True)]
    stacked = [np.stack([array, array[::-1]], -1) for array in arrays]
    twice = jit(jax.vmap(jax.vmap(f), in_axes=-1))(*stacked)
    for i, j in itertools.product(range(2), range(2)):
        # The second of the last axis is reversed.
        assert_close(at((i, j), twice), in_float64(right, at(i ^ j, arrays)))


@each_derivative
@with_and_without_mask
def test_derivatives_in_every_operand_alone_and_together(f, right, names, masked):
    mask = [ONE["mask"]] if masked else []
    some = [*((i,) for i in range(len(names))), tuple(range(len(names)))]

    def derived(f, primals, tangents, moving):
        def moved(*arrays):
            operands = dict(enumerate(primals)) | dict(zip(moving, arrays, strict=True))
            return f(*operands.values(), *mask)

        at, along = ([side[i] for i in moving] for side in (primals, tangents))
        return [t(moved, at, along) for t in (directional, gradient, slope_of_gradient)]

    @compiled
    def derive(f, primals, tangents):
        return [derived(f, primals, tangents, moving) for moving in some]

    with jax.enable_x64(True):
        primals = [ONE[name].astype(np.float64) for name in names]
        tangents = [SEVERAL[name][0].astype(np.float64) for name in names]
        results, rights = (derive(g, primals, tangents) for g in (f, right))
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(rights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("total", [reference.plain, on_cpu.total])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 1, 1), (0, 2)),
        ((37, 5, 101), (0, 2)),
        ((64, 2, 1024), (0, 2)),
        ((6, 3, 48 * 32), (0, 2)),
        ((4099, 2, 1), (0, 2)),
        ((31, 5, 1), (0, 2)),
        ((2, 3, 0), (0, 2)),
        ((0, 3, 5), (0, 2)),
        ((4096, 16), (0,)),
        ((2, 8191), (1,)),
        ((2, 384), (1,)),
        ((3, 32, 4, 96), (1, 3)),
        ((2, 3, 11, 5, 77), (2, 4)),
    ],
    ids=str,
)
def test_totals(total, shape, axes):
    """Sums whole numbers, which is exact in whatever order."""
    values = RANDOM.randint(-9, 10, (2, *shape))
    rights = values.astype(np.float64).sum(tuple(axis + 1 for axis in axes), keepdims=True)
    both = jit(lambda first, second: total([first, second], axes))(*f32(values))
    (alone,) = jit(lambda values: total([values], axes))(f32(values[0]))
    for result, right in zip((*both, alone), (*rights, rights[0]), strict=True):
        np.testing.assert_array_equal(result, right)
        assert result.dtype == np.float32
