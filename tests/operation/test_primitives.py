"""Tests every rule that JAX asks of a primitive on the passes over x, by their formulas.

Here x has two spatial axes, which are flattened when a program is lowered. The interface for
new primitives is the one that JAX may change; this is where it is noticed.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import reference
from eqx_norm._normalise.arithmetic import Arithmetic
from eqx_norm._normalise.primitives import (
    ACTIVATED,
    AFFINE,
    DEVIATIONS,
    STATISTICS,
    SUMS,
    Static,
    bind,
)
from tests.compiling import jit
from tests.helpers import f32

N, C, H, W = 5, 3, 2, 4
COLUMN = (1, C, 1, 1)
SUMMED = (0, 2, 3)
STATIC = Static(2, Arithmetic())
RANDOM = np.random.RandomState(0)


def operands(*ensemble):
    """Returns one of each operand, or one for each member of an ensemble."""
    full, column = (*ensemble, N, C, H, W), (*ensemble, *COLUMN)
    g, x = f32(RANDOM.standard_normal((2, *full)) + 1)
    mean, rest, a, b = RANDOM.standard_normal((4, *column))
    mask = jnp.asarray(RANDOM.random((*ensemble, N, 1, H, W)) < 0.6)
    # In the tests the rest is no smaller than the mean, so that it matters.
    return {
        "g": g,
        "x": x,
        "mean": f32(mean),
        "rest": f32(rest),
        "mask": mask,
        "a": f32(a),
        "b": f32(b),
    }


ONE, SEVERAL = operands(), operands(2)
compiled = functools.partial(jit, static_argnums=0)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def activation(u):
    """Is neither 0 nor flat at 0, which is what a masked place must not show."""
    return jax.nn.silu(u) + jnp.cos(u)


def statistics(x, mask=None):
    count, mean, m2, mean_rest = bind(STATISTICS, x, mask, static=STATIC)
    return count, mean + mean_rest, m2


def deviations(x, mask=None):
    wide = x.astype(reference.compute_dtype(x.dtype))
    mean, rest = (ONE[name].astype(wide.dtype) for name in ("mean", "rest"))
    return bind(DEVIATIONS, wide, x, mean, rest, mask, static=STATIC, shape=COLUMN)


def sums(g, x, mean, rest, mask=None):
    return tuple(bind(SUMS, g, x, mean, rest, mask, static=STATIC, shape=mean.shape))


def affine(a, b, x, mean, rest, mask=None):
    return bind(AFFINE, a, b, x, mean, rest, mask, static=STATIC)[0]


def activated(a, b, x, mean, rest, mask=None):
    static = STATIC._replace(activation=activation, dtype=b.dtype)
    wide = x.astype(b.dtype)
    return bind(ACTIVATED, a, b, wide, x, mean, rest, mask, static=static)[0]


def right_statistics(x, mask=None):
    mask = jnp.broadcast_to(True if mask is None else mask, x.shape)
    n = mask.sum(SUMMED, dtype=x.dtype)
    mean = jnp.where(mask, x, 0).sum(SUMMED) / n
    d = jnp.where(mask, x - mean[:, None, None], 0)
    return n, mean, (d * d).sum(SUMMED)


def right_deviations(x, mask=None):
    """Returns two zeros that change as sum(d) and sum(d^2) do."""
    mean, rest = (ONE[name].astype(x.dtype) for name in ("mean", "rest"))
    d = right_affine(0, 1, x, mean, rest, mask)
    changes = (moving - jax.lax.stop_gradient(moving) for moving in (d, d * d))
    return tuple(change.sum(SUMMED, keepdims=True) for change in changes)


def right_sums(g, x, mean, rest, mask=None):
    summands = g, g * (x - mean - rest)
    return tuple(weighed(values, mask).sum(SUMMED, keepdims=True) for values in summands)


def right_affine(a, b, x, mean, rest, mask=None):
    return weighed(a + b * (x - mean - rest), mask)


def right_activated(a, b, x, mean, rest, mask=None):
    u = right_affine(a, b, x, mean, rest)
    return weighed(u / (1 + jnp.exp(-u)) + jnp.cos(u), mask)


def weighed(values, mask):
    return values if mask is None else jnp.where(mask, values, 0)


# What the layers bind, and the formula.
DIFFERENTIATED = {
    "deviations": (deviations, right_deviations, ("x",)),
    "sums": (sums, right_sums, ("g", "x", "mean", "rest")),
    "affine": (affine, right_affine, ("a", "b", "x", "mean", "rest")),
    "activated": (activated, right_activated, ("a", "b", "x", "mean", "rest")),
}
ALL = {"statistics": (statistics, right_statistics, ("x",))} | DIFFERENTIATED
each = pytest.mark.parametrize(("f", "right", "names"), ALL.values(), ids=ALL)
each_derivative = pytest.mark.parametrize(
    ("f", "right", "names"), DIFFERENTIATED.values(), ids=DIFFERENTIATED
)
with_and_without_mask = pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])


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
        close(a, b)


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
    combinations = list(itertools.product((False, True), repeat=len(names)))[1:]

    @compiled
    def every_combination(f, one, several):
        return [
            jax.vmap(f, in_axes=[0 if is_mapped else None for is_mapped in mapped])(
                *(
                    (several if is_mapped else one)[name]
                    for name, is_mapped in zip(names, mapped, strict=True)
                )
            )
            for mapped in combinations
        ]

    results = jax.tree.map(np.asarray, every_combination(f, ONE, SEVERAL))
    for mapped, result in zip(combinations, results, strict=True):
        for member in range(2):
            arrays = [
                SEVERAL[name][member] if is_mapped else ONE[name]
                for name, is_mapped in zip(names, mapped, strict=True)
            ]
            ours = jax.tree.map(lambda a: a[member], result)  # noqa: B023  (called at once)
            assert_close(ours, in_float64(right, arrays))


@each
def test_mapped_over_an_axis_that_is_not_the_first_and_twice(f, right, names):
    arrays = [SEVERAL[name] for name in named(names, True)]
    last = jit(jax.vmap(f, in_axes=-1))(*(np.moveaxis(a, 0, -1) for a in arrays))
    twice = jit(jax.vmap(jax.vmap(f)))(*(np.stack([a, a[::-1]]) for a in arrays))
    last, twice = (jax.tree.map(np.asarray, results) for results in (last, twice))
    for member in range(2):
        expected = in_float64(right, [a[member] for a in arrays])
        assert_close(jax.tree.map(lambda a: a[member], last), expected)  # noqa: B023  (called at once)
        for i in range(2):
            ours = jax.tree.map(lambda a: a[i, member ^ i], twice)  # noqa: B023  (called at once)
            assert_close(ours, expected)


@with_and_without_mask
def test_transposes_of_an_ensemble(masked):
    """Tests that `sums` in g and `affine` in (a, b) are each other's transpose."""
    names = named(("x", "mean", "rest"), masked)
    centre = [SEVERAL[name] for name in names]
    g, a, b = (SEVERAL[name] for name in ("g", "a", "b"))
    axes = [0] * len(names)
    both = jax.vmap(sums, [0, *axes])
    (to_g,) = jax.linear_transpose(lambda g: both(g, *centre), g)((a, b))
    # Without a cotangent of the other sum.
    (from_first,) = jax.linear_transpose(lambda g: both(g, *centre)[0], g)(a)
    # a and b are shared by the members: their cotangents are summed over them.
    shared = jax.vmap(affine, [None, None, *axes])
    to_ab = jax.linear_transpose(lambda a, b: shared(a, b, *centre), a[0], b[0])(g)
    rights = []
    for i in range(2):
        member = [array[i] for array in centre]
        assert_close(to_g[i], in_float64(right_affine, (a[i], b[i], *member)))
        assert_close(from_first[i], in_float64(right_affine, (a[i], 0 * b[i], *member)))
        rights.append(in_float64(right_sums, (g[i], *member)))
    assert_close(to_ab, tuple(map(sum, zip(*rights, strict=True))))


@each_derivative
@with_and_without_mask
def test_derivatives_in_every_operand_alone_and_together(f, right, names, masked):
    rest = [ONE["mask"]] if masked else []
    alone = [(i,) for i in range(len(names))]

    def along(f, primals, tangents, moving):
        def moved(*some):
            arrays = list(primals)
            for i, array in zip(moving, some, strict=True):
                arrays[i] = array
            return f(*arrays, *rest)

        def scalar(*some):
            return sum(jnp.sum(jnp.sin(out + 1)) for out in jax.tree.leaves(moved(*some)))

        point, direction = ([side[i] for i in moving] for side in (primals, tangents))
        every = tuple(range(len(moving)))
        return (
            jax.jvp(moved, point, direction),
            jax.grad(scalar, every)(*point),
            jax.jvp(jax.grad(scalar, every), point, direction)[1],
        )

    @compiled
    def derive(f, primals, tangents):
        together = tuple(range(len(names)))
        return [along(f, primals, tangents, moving) for moving in (*alone, together)]

    with jax.enable_x64(True):
        primals = [ONE[name].astype(np.float64) for name in names]
        tangents = [SEVERAL[name][0].astype(np.float64) for name in names]
        results, rights = (derive(g, primals, tangents) for g in (f, right))
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(rights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


SHAPES = [
    ((1, 1, 1), (0, 2)),
    ((7, 3, 13), (0, 2)),
    ((37, 5, 101), (0, 2)),
    ((64, 2, 1024), (0, 2)),
    ((6, 3, 48 * 32), (0, 2)),
    ((4099, 2, 1), (0, 2)),
    ((2, 3, 0), (0, 2)),
    ((0, 3, 5), (0, 2)),
    ((4096, 16), (0,)),
    ((4095, 7), (0,)),
    ((2, 8191), (1,)),
    ((3, 64 * 256), (1,)),
    ((3, 32, 4, 96), (1, 3)),
    ((2, 3, 11, 5, 77), (2, 4)),
]


@pytest.mark.parametrize("total", [reference.plain, reference.by_tree])
@pytest.mark.parametrize(("shape", "axes"), SHAPES, ids=str)
def test_totals(total, shape, axes):
    """Sums whole numbers, which is exact in whatever order."""
    values = RANDOM.randint(-9, 10, (2, *shape))
    rights = values.astype(np.float64).sum(tuple(axis + 1 for axis in axes), keepdims=True)
    both = jit(lambda first, second: total([first, second], axes))(*f32(values))
    (alone,) = jit(lambda values: total([values], axes))(f32(values[0]))
    for result, right in zip((*both, alone), (*rights, rights[0]), strict=True):
        np.testing.assert_array_equal(result, right)
        assert result.dtype == np.float32


@pytest.mark.x32  # subtracts float64 from float32, which strict promotion forbids
@pytest.mark.parametrize("total", [reference.plain, reference.by_tree])
def test_totals_of_fractions(total):
    values = RANDOM.standard_normal((64, 3, 1024)) + 1
    single = np.asarray(values, np.float32).astype(np.float64)
    right, scale = single.sum((0, 2), keepdims=True), np.abs(single).sum((0, 2), keepdims=True)
    pair = jax.jit(lambda a, b: total([a, b], (0, 2)))(f32(values), f32(values) ** 2)
    # A sum of n numbers, however it is added up in blocks of up to 2048, is off by less.
    assert np.max(np.abs(pair[0] - right) / scale) < 2048 * np.finfo(np.float32).eps / 2
    with jax.enable_x64(True):
        (exact,) = total([jnp.asarray(single)], (0, 2))
        np.testing.assert_allclose(exact, right, rtol=1e-13)
