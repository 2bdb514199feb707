"""The passes over x, as primitives of JAX.

    statistics(x)                  count, mean, rest, m2                 (not differentiated)
    sums(g; x, mean)               sum(g), sum(g (x - mean))             linear in g
    affine(a, b; x, mean)          a + b (x - mean)                      linear in a and b
    activated(a, b, x, mean)       act(affine)
    slope(g; a, b, x, mean)        act'(affine) g                        linear in g
    pushed(a', b', g; ...)         slope(affine(a', b') + g)             linear in a', b', g
    pulled(g; ...)                 sums(slope(g)), slope(g)              linear in g

`sums` and `affine` are each other's transpose, so are `pushed` and `pulled`, and `slope` is its
own. That is the derivative rule of this package: differentiated and transposed by JAX, the
backward pass of a normalisation is one `sums` of the slope and one `affine`; forward mode and
all higher orders remain; and of the size of x nothing is kept but x. (`pushed` and `pulled` are
made of the others. As one, a kernel can compute the slope while it sums.)

In jax.numpy alone the transpose would have four sums where two suffice, and would keep x - mean
and what the activation needs. And a primitive is lowered for each platform in its own way (on a
CPU it sums by a tree, see `totals`), where `lax.platform_dependent` would branch while tracing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from . import invariant, reference, totals
from .gpu import choice as kernels
from .new_primitive import bind, new_primitive
from .reference import Activation


def statistics(
    x: Array, mask: Array | None = None, *, implementation: Any = "auto"
) -> tuple[Array, Array, Array, Array]:
    """See `reference.statistics`."""
    count, mean, rest, m2 = bind(STATISTICS, x, mask, implementation=implementation)
    return count, mean, rest, m2


def sums(
    g: Array,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None,
    shape: tuple[int, ...],
    *,
    implementation: Any = "auto",
) -> tuple[Array, Array]:
    """See `reference.sums`."""
    if isinstance(implementation, invariant.Across):
        how: Any = {"activation": None, "implementation": implementation}
        sum_g, sum_gd, _ = bind(PULLED, g, mean, rest, x, mean, rest, mask, shape=shape, **how)
    else:
        sum_g, sum_gd = bind(SUMS, g, x, mean, rest, mask, shape=shape)
    return sum_g, sum_gd


def affine(
    a: Array, b: Array, x: Array, mean: Array, rest: Array, mask: Array | None = None
) -> Array:
    """See `reference.affine`."""
    return bind(AFFINE, a, b, x, mean, rest, mask)[0]


def activated(
    activation: Activation | None,
    dtype: jnp.dtype,
    a: Array,
    b: Array,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None = None,
    *,
    implementation: Any = "auto",
) -> Array:
    """See `reference.activated`; `activation` must not close over traced arrays.

    The result is of `dtype`, and so is what its derivative is given.
    """
    how: Any = {"activation": activation, "dtype": dtype, "implementation": implementation}
    return bind(ACTIVATED, a, b, x, mean, rest, mask, **how)[0]


def again(*vectors: Array) -> list[Array]:
    """The same; but what XLA has computed of them before is not kept for what comes now."""
    return AGAIN.bind(*vectors)


# --- What they compute.


def _affine_of(*arrays: Array) -> list[Array]:
    return [reference.affine(*arrays)]


def _activated_of(*arrays: Array, activation: Any, dtype: jnp.dtype) -> list[Array]:
    return [reference.activated(activation, *arrays).astype(dtype)]


def _slope_of(*arrays: Array, activation: Any) -> list[Array]:
    return [reference.slope(activation, *arrays)]


def _slope_elsewhere(
    g: Array, a: Array, b: Array, x: Array, *rest: Array, activation: Any
) -> list[Array]:
    """For a GPU, where XLA writes out a mask that two passes need.

    Where nothing but columns is summed, that costs 2.5 times reading x in bfloat16; as a
    product the slope of a ReLU is computed again. (Between convolutions the product costs
    more: see experiments/results/gpu_compile.csv.)
    """
    if activation is jax.nn.relu and x.shape[-1] == 1:
        return [g * jnp.sign(reference.activated(activation, a, b, x, *rest))]
    return _slope_of(g, a, b, x, *rest, activation=activation)


def _pushed_of(
    da: Array, db: Array, du: Array, *inner: Array, activation: Any, dtype: jnp.dtype
) -> list[Array]:
    _, _, x, mean, rest, *_ = inner
    tangent = reference.affine(da, db, x, mean, rest) + du
    return [reference.slope(activation, tangent, *inner).astype(dtype)]


def _pulled_of(
    g: Array,
    a: Array,
    *inner: Array,
    activation: Any,
    shape: tuple[int, ...],
    total: totals.Total,
    slope: Callable[..., Any],
) -> list[Array]:
    (g,) = slope(g.astype(a.dtype), a, *inner, activation=activation)
    _, *centre = inner
    return [*reference.sums(g, *centre, shape=shape, total=total), g]


def _statistics_of_examples(x: Array, mask: Array | None = None) -> tuple[Array, ...]:
    if x.shape[-3] == x.shape[-1] == 1:
        count, *moments = _statistics_of_one(x, mask)
    else:
        count, *moments = reference.statistics(x, mask, total=invariant.total)
    # A constant, XLA would divide by in other ways than by the counts of other devices.
    return jnp.where(jnp.isnan(moments[0]), 1, count), *moments


def _statistics_of_one(x: Array, mask: Array | None) -> tuple[Array, ...]:
    """The same, of one value each, without the passes that it takes to find out."""
    x = reference.counted(x.astype(reference.compute_dtype(x.dtype)), mask)
    count = jnp.ones_like(x) if mask is None else jnp.broadcast_to(mask, x.shape)
    nothing = x - x  # or NaN, as it would be
    vectors = count.astype(x.dtype), x + nothing, nothing, nothing
    return tuple(vector[..., 0, :, 0] for vector in vectors)


def _pushed_from_sums(da: Array, *arrays: Array, **parameters: Any) -> list[Array]:
    # On several devices -0 has been added to 0.
    return _pushed_of(jnp.where(da == 0, 0, da), *arrays, **parameters)


STATISTICS = new_primitive(
    "statistics",
    reference.statistics,
    functools.partial(reference.statistics, total=totals.by_tree),
    lambda x, *_: [((*x.shape[:-3], x.shape[-2]), reference.compute_dtype(x.dtype))] * 4,
    full=[0],
    kernel=kernels.of_statistics,
    invariant=invariant.rounded(_statistics_of_examples),
)
SUMS = new_primitive(
    "sums",
    reference.sums,
    functools.partial(reference.sums, total=totals.by_tree),
    lambda g, *_, shape: [(shape, g.dtype)] * 2,
    full=[0, 1],
)
AFFINE = new_primitive(
    "affine", _affine_of, _affine_of, lambda a, b, x, *_: [(x.shape, a.dtype)], full=[2]
)
ACTIVATED = new_primitive(
    "activated",
    _activated_of,
    _activated_of,
    lambda a, b, x, *_, activation, dtype: [(x.shape, dtype)],
    full=[2],
    invariant=invariant.rounded(_activated_of),
)
SLOPE = new_primitive(
    "slope",
    _slope_elsewhere,
    _slope_of,
    lambda g, *_, activation: [(g.shape, g.dtype)],
    full=[0, 3],
)
PUSHED = new_primitive(
    "pushed",
    _pushed_of,
    _pushed_of,
    lambda da, db, du, *_, activation, dtype: [(du.shape, dtype)],
    full=[2, 5],
    invariant=invariant.rounded(_pushed_from_sums),
)
PULLED = new_primitive(
    "pulled",
    functools.partial(_pulled_of, total=totals.plain, slope=_slope_elsewhere),
    functools.partial(_pulled_of, total=totals.by_tree, slope=_slope_of),
    lambda g, a, *_, activation, shape: [(shape, a.dtype)] * 2 + [(g.shape, a.dtype)],
    full=[0, 3],
    kernel=kernels.of_pulled,
    invariant=invariant.rounded(
        functools.partial(_pulled_of, total=invariant.total, slope=_slope_of)
    ),
)


# The same vectors, as if they were others. On a GPU, XLA would otherwise keep what the forward
# pass has computed of them and x, rather than compute it again. A CPU does so anyway. (Not x
# itself: that would be kept twice, once as each.)
AGAIN = Primitive("eqx_norm_again")
AGAIN.multiple_results = True
AGAIN.def_impl(lambda *arrays: arrays)
AGAIN.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(AGAIN, mlir.lower_fun(lambda *a: lax.optimization_barrier(a), True))
mlir.register_lowering(AGAIN, lambda context, *arrays: arrays, platform="cpu")
batching.primitive_batchers[AGAIN] = lambda arrays, axes: (AGAIN.bind(*arrays), axes)
ad.primitive_jvps[AGAIN] = lambda primals, tangents: (AGAIN.bind(*primals), tangents)
