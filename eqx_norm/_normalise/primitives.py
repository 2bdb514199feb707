"""The passes over x, as primitives of JAX.

    statistics(x)                        count, mean, m2, mean_rest      (not differentiated)
    deviations(x; mean)                  0 and 0, whose derivatives are `sums`
    sums(g; x, mean)                     sum(g), sum(g (x - mean))       linear in g
    affine(bias, scale; x, mean)         bias + scale (x - mean)         linear in bias, scale
    activated(bias, scale, x, mean)      activation(affine)
    activation_jvp(g; bias, ...)         activation'(affine) g           linear in g
    activated_jvp(bias', scale', u'; ..) activation_jvp(affine(bias', scale') + u'), linear in
                                         bias', scale' and u'
    activated_vjp(g; bias, ...)          sums(activation_jvp(g)), activation_jvp(g)

`sums` and `affine` are each other's transpose, so are `activated_jvp` and `activated_vjp`, and
`activation_jvp` is its own. So the backward pass of a normalisation, differentiated and
transposed by JAX, is one `activated_vjp` and one `affine`; forward mode and all higher orders
remain; and of the size of x nothing is kept but x. (`activated_jvp` and `activated_vjp` are
made of the others. As one, a kernel can compute the activation's derivative while it sums.)

In jax.numpy alone the transpose would have four sums where two suffice, and would keep
x - mean and what the activation needs. And a primitive is lowered for each platform in its own
way (on a CPU it sums by a tree, see `totals`); `lax.platform_dependent` would branch while
tracing.

Operands are positional: `bias, scale, x, mean, mean_rest` and, if there is one, `mask`. All
have as many axes as x, of size 1 where they do not differ. `deviations` and `activated` also
take `wide`, which is x in the dtype to calculate in. They do not use its value: its tangent is
what their derivatives take for that of x, so that the cotangents which x gets from both are
added before they are rounded to half precision.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from . import invariant, reference, totals
from .gpu import choice
from .new_primitive import Shape, Static, new_primitive


def _deviations(wide: Array, *centre: Array, shape: Shape) -> list[Array]:
    del centre
    return [jnp.zeros(shape, wide.dtype)] * 2


def _activated(
    bias: Array, scale: Array, wide: Array, *centre: Array, activation: Any, dtype: Any
) -> Array:
    del wide
    return reference.activated(activation, bias, scale, *centre).astype(dtype)


def _activation_jvp(*arrays: Array, activation: Any) -> Array:
    return reference.activation_jvp(activation, *arrays)


def _activation_jvp_elsewhere(
    g: Array, bias: Array, scale: Array, x: Array, *rest: Array, activation: Any
) -> Array:
    """Returns `_activation_jvp` for a GPU, where XLA writes out a mask that two passes need.

    Where nothing but columns is summed, that costs 2.5 times reading x in bfloat16; as a
    product the derivative of a ReLU is computed again. (Between convolutions the product costs
    more: see experiments/results/compiled_programs.csv.)
    """
    if activation is jax.nn.relu and x.shape[-1] == 1:
        return g * jnp.sign(reference.activated(activation, bias, scale, x, *rest))
    return reference.activation_jvp(activation, g, bias, scale, x, *rest)


def _activated_jvp(
    dbias: Array, dscale: Array, du: Array, *inner: Array, activation: Any, dtype: Any
) -> Array:
    _, _, x, mean, mean_rest, *_ = inner
    tangent = reference.affine(dbias, dscale, x, mean, mean_rest) + du
    return reference.activation_jvp(activation, tangent, *inner).astype(dtype)


def _activated_vjp(
    g: Array,
    bias: Array,
    scale: Array,
    *centre: Array,
    activation: Any,
    shape: Shape,
    total: totals.Total = totals.plain,
    activation_jvp: Callable[..., Array] = _activation_jvp,
) -> list[Array]:
    g = activation_jvp(g.astype(bias.dtype), bias, scale, *centre, activation=activation)
    return [*reference.sums(g, *centre, shape=shape, total=total), g]


# --- Where no number of devices changes a bit.


def _statistics_of_examples(x: Array, mask: Array | None = None) -> Any:
    if x.shape[-3] == x.shape[-1] == 1:
        count, *moments = _statistics_of_one(x, mask)
    else:
        count, *moments = reference.statistics(x, mask, total=invariant.total)
    # A constant, XLA would divide by in other ways than by the counts of other devices.
    return jnp.where(jnp.isnan(moments[0]), 1, count), *moments


def _statistics_of_one(x: Array, mask: Array | None) -> tuple[Array, ...]:
    """Returns the statistics of one value each, without the passes that find them."""
    x = reference.counted(x.astype(reference.compute_dtype(x.dtype)), mask)
    count = jnp.ones_like(x) if mask is None else jnp.broadcast_to(mask, x.shape)
    nothing = x - x  # or NaN, as it would be
    vectors = count.astype(x.dtype), x + nothing, nothing, nothing
    return tuple(vector[..., 0, :, 0] for vector in vectors)


def _of_sums(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compute`, rounded; of the sums that it is given first, -0 is 0, as it is where
    several devices have added 0 to it."""

    def call(sums: Array, *arrays: Array, **parameters: Any) -> Any:
        return compute(jnp.where(sums == 0, 0, sums), *arrays, **parameters)

    return invariant.rounded(call)


# --- The primitives.


def _vectors(x: Any, *mask: Any, static: Static) -> list[tuple[Shape, Any]]:
    del mask
    *ensemble, _examples, channels, _values = static.flat(x.shape)
    return [((*ensemble, channels), reference.compute_dtype(x.dtype))] * 4


STATISTICS = new_primitive(
    "statistics",
    reference.statistics,
    _vectors,
    full=[0],
    on_cpu=functools.partial(reference.statistics, total=totals.by_tree),
    invariant=invariant.rounded(_statistics_of_examples),
    kernel=choice.of_statistics,
)
DEVIATIONS = new_primitive(
    "deviations",
    _deviations,
    lambda wide, *_, static, shape: [(shape, wide.dtype)] * 2,
    full=[0, 1],
)
SUMS = new_primitive(
    "sums",
    reference.sums,
    lambda g, *_, static, shape: [(shape, g.dtype)] * 2,
    full=[0, 1],
    on_cpu=functools.partial(reference.sums, total=totals.by_tree),
    invariant=invariant.rounded(functools.partial(reference.sums, total=invariant.total)),
)
AFFINE = new_primitive(
    "affine",
    reference.affine,
    lambda bias, scale, x, *_, static: [(x.shape, bias.dtype)],
    full=[2],
    invariant=_of_sums(reference.affine),
)
ACTIVATED = new_primitive(
    "activated",
    _activated,
    lambda bias, scale, wide, x, *_, static: [(x.shape, static.dtype)],
    full=[2, 3],
    takes=["activation", "dtype"],
    invariant=invariant.rounded(_activated),
)
ACTIVATION_JVP = new_primitive(
    "activation_jvp",
    _activation_jvp_elsewhere,
    lambda g, *_, static: [(g.shape, g.dtype)],
    full=[0, 3],
    takes=["activation"],
    on_cpu=_activation_jvp,
    invariant=invariant.rounded(_activation_jvp),
)
ACTIVATED_JVP = new_primitive(
    "activated_jvp",
    _activated_jvp,
    lambda dbias, dscale, du, *_, static: [(du.shape, static.dtype)],
    full=[2, 5],
    takes=["activation", "dtype"],
    invariant=_of_sums(_activated_jvp),
)
ACTIVATED_VJP = new_primitive(
    "activated_vjp",
    functools.partial(_activated_vjp, activation_jvp=_activation_jvp_elsewhere),
    lambda g, bias, *_, static, shape: [*[(shape, bias.dtype)] * 2, (g.shape, bias.dtype)],
    full=[0, 3],
    takes=["activation"],
    on_cpu=functools.partial(_activated_vjp, total=totals.by_tree),
    invariant=invariant.rounded(functools.partial(_activated_vjp, total=invariant.total)),
    kernel=choice.of_activated_vjp,
)


# Returns the vectors that it is given, as if they were others. On a GPU, XLA would otherwise
# keep what the forward pass has computed of them and x, rather than compute it again. A CPU
# computes it again anyway. (x itself is not passed through: it would be kept twice.)
RECOMPUTE_BARRIER = Primitive("eqx_norm_recompute_barrier")
RECOMPUTE_BARRIER.multiple_results = True
RECOMPUTE_BARRIER.def_impl(lambda *arrays: arrays)
RECOMPUTE_BARRIER.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(
    RECOMPUTE_BARRIER, mlir.lower_fun(lambda *a: lax.optimization_barrier(a), True)
)
mlir.register_lowering(RECOMPUTE_BARRIER, lambda context, *arrays: arrays, platform="cpu")
batching.primitive_batchers[RECOMPUTE_BARRIER] = lambda arrays, axes: (
    RECOMPUTE_BARRIER.bind(*arrays),
    axes,
)
