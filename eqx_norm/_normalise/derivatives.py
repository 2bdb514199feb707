"""Registers all derivative rules of the operation.

Where a primitive is linear in an operand, its derivative and transpose are primitives again. In
other operands they are those of what it is composed of, which JAX differentiates and transposes
as usual.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import Array

from . import elementwise, invariant, reference, rows
from .invariant import PRODUCT
from .new_primitive import Shape, Static, bind
from .primitives import (
    ACTIVATED,
    ACTIVATED_JVP,
    ACTIVATED_VJP,
    ACTIVATION_JVP,
    AFFINE,
    DEVIATIONS,
    RECOMPUTE_BARRIER,
    SUMS,
)
from .rows import ROWS, ROWS_JVP, ROWS_VJP


def _dense(tangent: Any, primal: Array) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, ad.Zero) else tangent


def _all_zero(*tangents: Any) -> bool:
    return all(isinstance(tangent, ad.Zero) for tangent in tangents)


# --- A normalisation.


def _deviations_jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
    results = bind(DEVIATIONS, *primals, **parameters)
    sum_dx, sum_dx_d = bind(SUMS, _dense(tangents[0], primals[0]), *primals[1:], **parameters)
    return results, [sum_dx, 2 * sum_dx_d]


def _activated_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    bias, scale, _, x, mean, mean_rest, *mask = primals
    bias, scale, mean, mean_rest = RECOMPUTE_BARRIER.bind(bias, scale, mean, mean_rest)
    inner = (bias, scale, x, mean, mean_rest, *mask)
    # The tangent of x is that of `wide`.
    d_bias, d_scale, d_wide, _, *d_mean = tangents
    d_inner = (d_bias, d_scale, d_wide, *d_mean)
    d_bias, d_scale, du = _affine_parts(inner, d_inner, static)
    d_bias, d_scale = static.arithmetic.from_first([d_bias, d_scale])
    if du is None:
        (tangent,) = bind(AFFINE, d_bias, d_scale, *inner[2:], static=static)
        (tangent,) = bind(ACTIVATION_JVP, tangent, *inner, static=static)
        tangent = [tangent.astype(static.dtype)]
    else:
        tangent = bind(ACTIVATED_JVP, d_bias, d_scale, du, *inner, static=static)
    return bind(ACTIVATED, *primals, static=static), tangent


def _affine_parts(
    primals: Any, tangents: Any, static: Static
) -> tuple[Array, Array, Array | None]:
    """Returns dbias, dscale and du: the tangent of `affine` is `affine(dbias, dscale) + du`."""
    bias, scale, _, mean, mean_rest, *_ = primals
    d_bias, d_scale, dx, d_mean, d_mean_rest, *_ = tangents
    times = static.arithmetic.product
    d_bias, d_scale = _dense(d_bias, bias), _dense(d_scale, scale)
    if not _all_zero(d_mean, d_mean_rest):
        # Part of the shift, so that its transpose is part of the same sums.
        d_mean = _dense(d_mean, mean) + _dense(d_mean_rest, mean_rest)
        d_bias = d_bias - times(scale, d_mean)
    d_bias, d_scale = jnp.broadcast_arrays(d_bias, d_scale)
    return d_bias, d_scale, None if _all_zero(dx) else times(scale, dx.astype(scale.dtype))


def _affine_tangent(primals: Any, tangents: Any, static: Static) -> Array:
    """Returns the tangent of `affine`; where the mask is false it may be anything."""
    d_bias, d_scale, du = _affine_parts(primals, tangents, static)
    (tangent,) = bind(AFFINE, d_bias, d_scale, *primals[2:], static=static)
    return tangent if du is None else tangent + du


def _affine_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    tangent = [_affine_tangent(primals, tangents, static)]
    if len(primals) > 5:
        # A selection would keep the mask for each channel; the primitive makes its own.
        plain = static._replace(activation=None)
        tangent = bind(ACTIVATION_JVP, *tangent, *primals, static=plain)
    return bind(AFFINE, *primals, static=static), tangent


def _sums_jvp(primals: Any, tangents: Any, *, static: Static, shape: Shape) -> Any:
    g, x, mean, mean_rest, *mask = primals
    dg, dx, d_mean, d_mean_rest, *_ = tangents
    d_sum, d_sum_d = bind(SUMS, _dense(dg, g), *primals[1:], static=static, shape=shape)
    if not _all_zero(dx, d_mean, d_mean_rest):
        d_mean, d_mean_rest = _dense(d_mean, mean), _dense(d_mean_rest, mean_rest)
        dd = reference.centred(_dense(dx, x), d_mean, d_mean_rest)
        axes = tuple(i for i, size in enumerate(shape) if size != g.shape[i])
        d_sum_d = d_sum_d + reference.counted(g * dd, *mask).sum(axes, keepdims=True)
    return bind(SUMS, *primals, static=static, shape=shape), [d_sum, d_sum_d]


def _activation_jvp_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    (g, *inner), (dg, *d_inner) = primals, tangents
    (tangent,) = bind(ACTIVATION_JVP, _dense(dg, g), *inner, static=static)
    if static.activation is not None and not _all_zero(*d_inner[:5]):
        (u,) = bind(AFFINE, *inner, static=static)
        du = _affine_tangent(inner, d_inner, static)
        act = functools.partial(reference.applied, static.activation)
        _, second = jax.jvp(lambda u: jax.jvp(act, (u,), (g,))[1], (u,), (du,))
        tangent = tangent + reference.counted(second, *inner[5:])
    return bind(ACTIVATION_JVP, *primals, static=static), [tangent]


def _composed_activated_jvp(
    d_bias: Array, d_scale: Array, du: Array, *inner: Array, static: Static
) -> list[Array]:
    (tangent,) = bind(AFFINE, d_bias, d_scale, *inner[2:], static=static)
    (tangent,) = bind(ACTIVATION_JVP, tangent + du, *inner, static=static)
    return [tangent.astype(static.dtype)]


def _composed_activated_vjp(
    g: Array, *inner: Array, static: Static, shape: Shape
) -> list[Array]:
    (g,) = bind(ACTIVATION_JVP, g.astype(inner[0].dtype), *inner, static=static)
    return [*bind(SUMS, g, *inner[2:], static=static, shape=shape), g]


# --- A row.


def _rows_jvp(primals: Any, tangents: Any, *, static: Static) -> Any:
    results = bind(ROWS, *primals, static=static)
    learns = not _all_zero(*tangents[1:])
    moving = map(_dense, tangents[: len(primals) if learns else 1], primals)
    (dy,) = bind(ROWS_JVP, *moving, *primals, *results[1:], static=static, learns=learns)
    # The moments change, too; their part in dy is in `rows_jvp` already.
    return results, [dy, *map(jnp.zeros_like, results[1:])]


# --- Primitives that are linear in their first operands.


def _jvp_of_linear(
    primitive: Primitive, linear: Callable[..., int], composed: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the rule of a primitive that is linear in its first `linear(**parameters)`
    operands. In the others, its derivative is that of what it is `composed` of."""

    def rule(primals: Any, tangents: Any, **parameters: Any) -> Any:
        n = linear(**parameters)
        along = map(_dense, tangents[:n], primals[:n])
        tangent = bind(primitive, *along, *primals[n:], **parameters)
        moving = [i for i in range(n, len(primals)) if not _all_zero(tangents[i])]

        def of_moving(moved: list[Array]) -> Any:
            arrays = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
            return composed(*arrays.values(), **parameters)

        if moving:
            at, along = ([values[i] for i in moving] for values in (primals, tangents))
            more = jax.jvp(of_moving, (at,), (along,))[1]
            tangent = list(map(jnp.add, tangent, more))
        return bind(primitive, *primals, **parameters), tangent

    return rule


def _transpose_of_linear(
    linear: Callable[..., int], transposed: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the rule of a primitive whose transpose, in its first operands, is `transposed`
    of the cotangents, those operands and the others. All cotangents are zero, or none is."""

    def rule(cotangents: Any, *operands: Any, **parameters: Any) -> Any:
        n = linear(**parameters)
        if _all_zero(*cotangents):
            return [None] * len(operands)
        moving, inner = operands[:n], operands[n:]
        results = transposed(cotangents, moving, inner, **parameters)
        wanted = zip(results, moving, strict=True)
        return [
            *(ct if ad.is_undefined_primal(operand) else None for ct, operand in wanted),
            *[None] * len(inner),
        ]

    return rule


def _zeros(cotangents: Any, *shapes: tuple[Shape, Any]) -> list[Array]:
    """Returns the cotangents, with zeros of so many shapes and dtypes in place of none."""
    pairs = zip(cotangents, shapes, strict=True)
    return [jnp.zeros(*like) if _all_zero(ct) else ct for ct, like in pairs]


def _sums_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Any, shape: Any
) -> Any:
    (g,) = moving
    bias, scale = _zeros(cotangents, *[(shape, g.aval.dtype)] * 2)
    return bind(AFFINE, bias, scale, *inner, static=static)


def _affine_transposed(cotangents: Any, moving: Any, inner: Any, *, static: Static) -> Any:
    one = next(operand for operand in moving if ad.is_undefined_primal(operand))
    return bind(SUMS, *cotangents, *inner, static=static, shape=one.aval.shape)


def _activation_jvp_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Static
) -> Any:
    del moving
    return bind(ACTIVATION_JVP, *cotangents, *inner, static=static)


def _activated_jvp_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Static
) -> Any:
    shape = moving[0].aval.shape
    return bind(ACTIVATED_VJP, *cotangents, *inner, static=static, shape=shape)


def _activated_vjp_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Static, shape: Shape
) -> Any:
    (g,), dtype = moving, inner[0].dtype
    linear = _zeros(cotangents, *[(shape, dtype)] * 2, (g.aval.shape, dtype))
    static = static._replace(dtype=g.aval.dtype)
    return bind(ACTIVATED_JVP, *linear, *inner, static=static)


def _rows_jvp_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Static, learns: bool
) -> Any:
    shape = moving[1].aval.shape if learns else None
    how: Any = {"static": static, "learns": learns, "shape": shape}
    return bind(ROWS_VJP, *cotangents, *inner, **how)


def _rows_vjp_transposed(
    cotangents: Any, moving: Any, inner: Any, *, static: Static, learns: bool, shape: Any
) -> Any:
    (g,) = moving
    affine = [(shape, array.dtype) for array in inner[1:3]] if learns else []
    linear = _zeros(cotangents, (g.aval.shape, g.aval.dtype), *affine)
    return bind(ROWS_JVP, *linear, *inner, static=static, learns=learns)


def _one(**_: Any) -> int:
    return 1


def _three(**_: Any) -> int:
    return 3


def _three_if_it_learns(*, learns: bool, **_: Any) -> int:
    return 3 if learns else 1


ad.primitive_jvps[DEVIATIONS] = _deviations_jvp
ad.primitive_jvps[ACTIVATED] = _activated_jvp
ad.primitive_jvps[AFFINE] = _affine_jvp
ad.primitive_jvps[SUMS] = _sums_jvp
ad.primitive_jvps[ACTIVATION_JVP] = _activation_jvp_jvp
ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[RECOMPUTE_BARRIER] = lambda primals, tangents: (
    RECOMPUTE_BARRIER.bind(*primals),
    tangents,
)
for _primitive, _linear, _composed in (
    (ACTIVATED_JVP, _three, _composed_activated_jvp),
    (ACTIVATED_VJP, _one, _composed_activated_vjp),
    (ROWS_JVP, _three_if_it_learns, rows.composed_jvp),
    (ROWS_VJP, _one, rows.composed_vjp),
):
    ad.primitive_jvps[_primitive] = _jvp_of_linear(_primitive, _linear, _composed)
for _primitive, _linear, _transposed in (
    (SUMS, _one, _sums_transposed),
    (AFFINE, lambda **_: 2, _affine_transposed),
    (ACTIVATION_JVP, _one, _activation_jvp_transposed),
    (ACTIVATED_JVP, _three, _activated_jvp_transposed),
    (ACTIVATED_VJP, _one, _activated_vjp_transposed),
    (ROWS_JVP, _three_if_it_learns, _rows_jvp_transposed),
    (ROWS_VJP, _one, _rows_vjp_transposed),
):
    ad.primitive_transposes[_primitive] = _transpose_of_linear(_linear, _transposed)


# --- Vectors, and activations with arrays of their own.


@reference.rsqrt.defjvp
def _rsqrt_jvp(primals: Any, tangents: Any) -> Any:
    """Computes a derivative that holds wherever its result can be held.

    That of `lax.rsqrt` is $-r / (2 x)$ times the tangent: in float32, 0 from $x = 10^{25}$ on,
    and infinite below $10^{-25}$. Multiplied by $r$ three times the tangent (or the cotangent,
    which is as large as the standard deviation) never leaves the range in between.
    """
    r = reference.rsqrt(*primals)
    return r, -0.5 * (r * (r * (r * tangents[0])))


@invariant.rsqrt.defjvp
def _invariant_rsqrt_jvp(primals: Any, tangents: Any) -> Any:
    r, times = invariant.rsqrt(*primals), invariant.product
    return r, times(-0.5, times(r, times(r, times(r, *tangents))))


def _product_transpose(ct: Any, linear: Any, other: Any) -> Array:
    ct = PRODUCT.bind(ct, other)
    shape = linear.aval.shape
    axes = [i for i, (had, has) in enumerate(zip(shape, ct.shape, strict=True)) if had != has]
    return ct.sum(axes, keepdims=True)


ad.defbilinear(
    PRODUCT,
    lambda ct, a, b: _product_transpose(ct, a, b),
    lambda ct, a, b: _product_transpose(ct, b, a),
)


@elementwise.recomputed.defjvp
def _recomputed_jvp(function: Any, static: Static, primals: Any, tangents: Any) -> Any:
    (arrays, _, *operands), (d_arrays, du, *_) = primals, tangents

    def tangent(arrays: Any, operands: Any, d_arrays: Any, du: Any) -> Array:
        bias, scale, x, mean, mean_rest, mask = operands
        bias, scale, mean, mean_rest = RECOMPUTE_BARRIER.bind(bias, scale, mean, mean_rest)
        (u,) = bind(AFFINE, bias, scale, x, mean, mean_rest, mask, static=static)
        return jax.jvp(function, (u, *arrays), (du, *d_arrays))[1]

    # What XLA must not share with the forward pass, the barrier has seen to.
    recomputed = jax.checkpoint(tangent, prevent_cse=False)
    result = elementwise.recomputed(function, static, *primals)
    return result, recomputed(arrays, operands, d_arrays, du)
