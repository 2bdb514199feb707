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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from . import invariant, reference, totals
from .new_primitive import Shape, Static, kernels, new_primitive


def _statistics(*arrays: Array, static: Static, total: totals.Total) -> tuple[Array, ...]:
    del static
    return reference.statistics(*arrays, total=total)


def _statistics_of_examples(x: Array, mask: Array | None = None, *, static: Static) -> Any:
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


def _deviations(wide: Array, *centre: Array, static: Static, shape: Shape) -> list[Array]:
    return [jnp.zeros(shape, wide.dtype)] * 2


def _sums(
    *arrays: Array, static: Static, shape: Shape, total: totals.Total
) -> tuple[Array, Array]:
    del static
    return reference.sums(*arrays, shape=shape, total=total)


def _affine(*arrays: Array, static: Static) -> list[Array]:
    del static
    return [reference.affine(*arrays)]


def _affine_of_sums(bias: Array, *arrays: Array, static: Static) -> list[Array]:
    # On several devices -0 has been added to 0.
    return _affine(jnp.where(bias == 0, 0, bias), *arrays, static=static)


def _activated(
    bias: Array, scale: Array, wide: Array, *centre: Array, static: Static
) -> list[Array]:
    del wide
    y = reference.activated(static.activation, bias, scale, *centre)
    return [y.astype(static.dtype)]


def _activation_jvp(*arrays: Array, static: Static) -> list[Array]:
    return [reference.activation_jvp(static.activation, *arrays)]


def _activation_jvp_elsewhere(
    g: Array, bias: Array, scale: Array, x: Array, *rest: Array, static: Static
) -> list[Array]:
    """Returns `_activation_jvp` for a GPU, where XLA writes out a mask that two passes need.

    Where nothing but columns is summed, that costs 2.5 times reading x in bfloat16; as a
    product the derivative of a ReLU is computed again. (Between convolutions the product costs
    more: see experiments/results/gpu_compile.csv.)
    """
    inner = (bias, scale, x, *rest)
    if static.activation is jax.nn.relu and x.shape[-1] == 1:
        return [g * jnp.sign(reference.activated(static.activation, *inner))]
    return _activation_jvp(g, *inner, static=static)


def _activated_jvp(
    dbias: Array, dscale: Array, du: Array, *inner: Array, static: Static
) -> list[Array]:
    _, _, x, mean, mean_rest, *_ = inner
    tangent = reference.affine(dbias, dscale, x, mean, mean_rest) + du
    return [reference.activation_jvp(static.activation, tangent, *inner).astype(static.dtype)]


def _activated_jvp_of_sums(dbias: Array, *arrays: Array, static: Static) -> list[Array]:
    # On several devices -0 has been added to 0.
    return _activated_jvp(jnp.where(dbias == 0, 0, dbias), *arrays, static=static)


def _activated_vjp(
    g: Array,
    bias: Array,
    scale: Array,
    *centre: Array,
    static: Static,
    shape: Shape,
    total: totals.Total,
    activation_jvp: Callable[..., Any],
) -> list[Array]:
    (g,) = activation_jvp(g.astype(bias.dtype), bias, scale, *centre, static=static)
    return [*reference.sums(g, *centre, shape=shape, total=total), g]


def _statistics_kernel(
    implementation: str, partitioned: bool, *arrays: Any, static: Static
) -> Any:
    del static
    kernel = kernels.of_statistics(implementation, partitioned, *arrays)

    def in_order(*arrays: Array, static: Static) -> tuple[Array, ...]:
        del static
        assert kernel is not None
        count, mean, mean_rest, m2 = kernel(*arrays)
        return count, mean, m2, mean_rest

    return kernel and in_order


def _activated_vjp_kernel(
    implementation: str, partitioned: bool, *arrays: Any, static: Static, shape: Shape
) -> Any:
    parameters: Any = {"activation": static.activation, "shape": shape}
    kernel = kernels.of_pulled(implementation, partitioned, *arrays, **parameters)

    def call(*arrays: Array, **_: Any) -> Sequence[Array]:
        assert kernel is not None
        return kernel(*arrays, **parameters)

    return kernel and call


def _vectors(x: Any, *mask: Any, static: Static) -> list[tuple[Shape, Any]]:
    del mask
    *ensemble, _examples, channels, _values = static.flat(x.shape)
    return [((*ensemble, channels), reference.compute_dtype(x.dtype))] * 4


STATISTICS = new_primitive(
    "statistics",
    functools.partial(_statistics, total=totals.plain),
    _vectors,
    full=[0],
    on_cpu=functools.partial(_statistics, total=totals.by_tree),
    invariant=invariant.rounded(_statistics_of_examples),
    kernel=_statistics_kernel,
)
DEVIATIONS = new_primitive(
    "deviations",
    _deviations,
    lambda wide, *_, static, shape: [(shape, wide.dtype)] * 2,
    full=[0, 1],
)
SUMS = new_primitive(
    "sums",
    functools.partial(_sums, total=totals.plain),
    lambda g, *_, static, shape: [(shape, g.dtype)] * 2,
    full=[0, 1],
    on_cpu=functools.partial(_sums, total=totals.by_tree),
    invariant=invariant.rounded(functools.partial(_sums, total=invariant.total)),
)
AFFINE = new_primitive(
    "affine",
    _affine,
    lambda bias, scale, x, *_, static: [(x.shape, bias.dtype)],
    full=[2],
    invariant=invariant.rounded(_affine_of_sums),
)
ACTIVATED = new_primitive(
    "activated",
    _activated,
    lambda bias, scale, wide, x, *_, static: [(x.shape, static.dtype)],
    full=[2, 3],
    invariant=invariant.rounded(_activated),
)
ACTIVATION_JVP = new_primitive(
    "activation_jvp",
    _activation_jvp_elsewhere,
    lambda g, *_, static: [(g.shape, g.dtype)],
    full=[0, 3],
    on_cpu=_activation_jvp,
    invariant=invariant.rounded(_activation_jvp),
)
ACTIVATED_JVP = new_primitive(
    "activated_jvp",
    _activated_jvp,
    lambda dbias, dscale, du, *_, static: [(du.shape, static.dtype)],
    full=[2, 5],
    invariant=invariant.rounded(_activated_jvp_of_sums),
)
ACTIVATED_VJP = new_primitive(
    "activated_vjp",
    functools.partial(
        _activated_vjp, total=totals.plain, activation_jvp=_activation_jvp_elsewhere
    ),
    lambda g, bias, *_, static, shape: [*[(shape, bias.dtype)] * 2, (g.shape, bias.dtype)],
    full=[0, 3],
    on_cpu=functools.partial(
        _activated_vjp, total=totals.by_tree, activation_jvp=_activation_jvp
    ),
    invariant=invariant.rounded(
        functools.partial(_activated_vjp, total=invariant.total, activation_jvp=_activation_jvp)
    ),
    kernel=_activated_vjp_kernel,
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
