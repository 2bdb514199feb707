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

from . import elementwise, invariant, reference, rows, values
from .collectives import TOTAL
from .invariant import PRODUCT
from .primitives import (
    ACTIVATED,
    ACTIVATED_JVP,
    ACTIVATED_VJP,
    ACTIVATION_JVP,
    AFFINE,
    DEVIATIONS,
    RECOMPUTE_BARRIER,
    SUMS,
    Shape,
    Static,
    bind,
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
    return results, [sum_dx, sum_dx_d]


@functools.partial(values.moved.defjvp, symbolic_zeros=True)
def _moved_jvp(primals: Any, tangents: Any) -> Any:
    """Differentiates by the sums: the mean and m2 that are given do not move."""
    (_, _, sum_d, _, n), (_, _, d, half_d2, _) = primals, tangents
    return values.moved(*primals), (d / n, 2 * (half_d2 - sum_d * d / n))


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
        tangent = _composed_activated_jvp(d_bias, d_scale, du, *inner, static=static)
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
    d_bias: Array, d_scale: Array, du: Array | None, *inner: Array, static: Static
) -> list[Array]:
    (tangent,) = bind(AFFINE, d_bias, d_scale, *inner[2:], static=static)
    tangent = tangent if du is None else tangent + du
    (tangent,) = bind(ACTIVATION_JVP, tangent, *inner, static=static)
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


def _register_linear(
    primitive: Primitive,
    linear: int,
    transposed: Callable[..., Any],
    composed: Callable[..., Any] | None = None,
) -> None:
    """Registers the rules of a primitive that is linear in its first `linear` operands.

    Its transpose in those is `transposed(cotangents, linear operands, others, ...)`. If it has
    no rule of its own, its derivative in the others is that of what it is `composed` of.
    """

    def split(operands: Any, learns: bool = True, **_: Any) -> tuple[Any, Any]:
        n = linear if learns else 1
        return operands[:n], operands[n:]

    def jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
        moving, inner = split(primals, **parameters)
        along = map(_dense, tangents[: len(moving)], moving)
        tangent = bind(primitive, *along, *inner, **parameters)
        varied = [i for i in range(len(moving), len(primals)) if not _all_zero(tangents[i])]

        def of_varied(arrays: list[Array]) -> Any:
            operands = dict(enumerate(primals)) | dict(zip(varied, arrays, strict=True))
            assert composed is not None
            return composed(*operands.values(), **parameters)

        if varied:
            at, along = ([values[i] for i in varied] for values in (primals, tangents))
            tangent = map(jnp.add, tangent, jax.jvp(of_varied, (at,), (along,))[1])
        return bind(primitive, *primals, **parameters), list(tangent)

    def transpose(cotangents: Any, *operands: Any, **parameters: Any) -> Any:
        if _all_zero(*cotangents):
            return [None] * len(operands)
        moving, inner = split(operands, **parameters)
        results = transposed(cotangents, moving, inner, **parameters)
        pairs = zip(results, moving, strict=True)
        wanted = [ct if ad.is_undefined_primal(operand) else None for ct, operand in pairs]
        return [*wanted, *[None] * len(inner)]

    ad.primitive_transposes[primitive] = transpose
    if composed is not None:
        ad.primitive_jvps[primitive] = jvp


def _zeros(cotangents: Any, *shapes: tuple[Shape, Any]) -> list[Array]:
    """Returns the cotangents, with zeros of so many shapes and dtypes in place of none."""
    pairs = zip(cotangents, shapes, strict=True)
    return [jnp.zeros(*like) if _all_zero(ct) else ct for ct, like in pairs]


def _sums_transposed(cts: Any, moving: Any, inner: Any, *, static: Static, shape: Any) -> Any:
    bias, scale = _zeros(cts, *[(shape, moving[0].aval.dtype)] * 2)
    return bind(AFFINE, bias, scale, *inner, static=static)


def _affine_transposed(cts: Any, moving: Any, inner: Any, *, static: Static) -> Any:
    one = next(operand for operand in moving if ad.is_undefined_primal(operand))
    return bind(SUMS, *cts, *inner, static=static, shape=one.aval.shape)


def _activation_jvp_transposed(cts: Any, _: Any, inner: Any, *, static: Static) -> Any:
    return bind(ACTIVATION_JVP, *cts, *inner, static=static)


def _activated_jvp_transposed(cts: Any, moving: Any, inner: Any, *, static: Static) -> Any:
    return bind(ACTIVATED_VJP, *cts, *inner, static=static, shape=moving[0].aval.shape)


def _activated_vjp_transposed(
    cts: Any, moving: Any, inner: Any, *, static: Static, shape: Shape
) -> Any:
    (g,), dtype = moving, inner[0].dtype
    linear = _zeros(cts, *[(shape, dtype)] * 2, (g.aval.shape, dtype))
    return bind(ACTIVATED_JVP, *linear, *inner, static=static._replace(dtype=g.aval.dtype))


def _rows_jvp_transposed(cts: Any, moving: Any, inner: Any, **parameters: Any) -> Any:
    shape = moving[1].aval.shape if parameters["learns"] else None
    return bind(ROWS_VJP, *cts, *inner, shape=shape, **parameters)


def _rows_vjp_transposed(
    cts: Any, moving: Any, inner: Any, *, shape: Shape | None, **parameters: Any
) -> Any:
    (g,) = moving
    affine = [] if shape is None else [(shape, array.dtype) for array in inner[1:3]]
    linear = _zeros(cts, (g.aval.shape, g.aval.dtype), *affine)
    return bind(ROWS_JVP, *linear, *inner, **parameters)


_register_linear(SUMS, 1, _sums_transposed)
_register_linear(AFFINE, 2, _affine_transposed)
_register_linear(ACTIVATION_JVP, 1, _activation_jvp_transposed)
_register_linear(ACTIVATED_JVP, 3, _activated_jvp_transposed, _composed_activated_jvp)
_register_linear(ACTIVATED_VJP, 1, _activated_vjp_transposed, _composed_activated_vjp)
_register_linear(ROWS_JVP, 3, _rows_jvp_transposed, rows.composed_jvp)
_register_linear(ROWS_VJP, 1, _rows_vjp_transposed, rows.composed_vjp)
ad.primitive_jvps.update(
    {
        DEVIATIONS: _deviations_jvp,
        ACTIVATED: _activated_jvp,
        AFFINE: _affine_jvp,
        SUMS: _sums_jvp,
        ACTIVATION_JVP: _activation_jvp_jvp,
        ROWS: _rows_jvp,
        RECOMPUTE_BARRIER: lambda primals, tangents: (
            RECOMPUTE_BARRIER.bind(*primals),
            tangents,
        ),
    }
)


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


ad.deflinear2(TOTAL, lambda ct, _, **parameters: [TOTAL.bind(ct, **parameters)])
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
