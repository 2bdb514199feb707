"""The derivatives of the passes.

Those in what a primitive is linear in are primitives again; the others are ordinary operations,
which JAX differentiates and transposes as usual. `how` is the implementation, which `activated`
hands on to `pushed`, and that to `pulled`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from . import reference
from .invariant import Across, from_first, product
from .new_primitive import bind
from .primitives import ACTIVATED, AFFINE, AGAIN, PULLED, PUSHED, SLOPE, SUMS
from .reference import Activation


def tangent(
    activation: Activation | None, dtype: jnp.dtype, operands: Any, tangents: Any, **how: Any
) -> Array:
    """Returns the tangent of `activated`, for operands without a `None`.

    Its own derivative, except that the tangent of x may be of a higher precision than x.
    """
    return _activated_jvp(operands, tangents, activation=activation, dtype=dtype, **how)[1][0]


def _sums_jvp(primals: Any, tangents: Any, *, shape: tuple[int, ...]) -> Any:
    g, x, mean, rest, *mask = primals
    dg, dx, dmean, drest, *_ = tangents
    d_sum, d_sum_d = bind(SUMS, dense(dg, g), x, mean, rest, *mask, shape=shape)
    if not all_zero(dx, dmean, drest):
        dd = reference.centred(dense(dx, x), dense(dmean, mean), dense(drest, rest))
        axes = tuple(i for i, size in enumerate(shape) if size != g.shape[i])
        d_sum_d = d_sum_d + reference.counted(g * dd, *mask).sum(axes, keepdims=True)
    return bind(SUMS, *primals, shape=shape), [d_sum, d_sum_d]


def _affine_jvp(primals: Any, tangents: Any) -> Any:
    tangent = [_affine_tangent(primals, tangents)]
    if len(primals) > 5:
        # A selection would keep the mask for each channel; `slope` makes its own.
        tangent = bind(SLOPE, *tangent, *primals, activation=None)
    return bind(AFFINE, *primals), tangent


def _affine_tangent(primals: Any, tangents: Any) -> Array:
    """Returns the tangent of `affine`; where the mask is false it may be anything."""
    da, db, du = _linear_parts(primals, tangents)
    (tangent,) = bind(AFFINE, da, db, *primals[2:])
    return tangent if du is None else tangent + du


def _linear_parts(
    primals: Any, tangents: Any, times: Callable[[Any, Any], Array] = operator.mul
) -> tuple[Array, Array, Array | None]:
    """The tangent of `affine` is `affine(da, db) + du`."""
    a, b, _, mean, rest, *_ = primals
    da, db, dx, dmean, drest, *_ = tangents
    da, db = dense(da, a), dense(db, b)
    if not all_zero(dmean, drest):
        # Part of the shift, so that its transpose is part of the same sums.
        da = da - times(b, dense(dmean, mean) + dense(drest, rest))
    da, db = jnp.broadcast_arrays(da, db)
    return da, db, None if all_zero(dx) else times(b, dx.astype(b.dtype))


def _activated_jvp(
    primals: Any, tangents: Any, *, activation: Any, dtype: Any, **how: Any
) -> Any:
    a, b, x, mean, rest, *mask = primals
    a, b, mean, rest = AGAIN.bind(a, b, mean, rest)
    inner = (a, b, x, mean, rest, *mask)
    if isinstance(across := how.get("implementation"), Across):
        da, db, du = _linear_parts(inner, tangents, product)
        da, db = from_first([da, db], across)
        # Of those that sum when transposed, only `pushed` does so in a fixed order.
        du = jnp.zeros_like(x, a.dtype) if du is None else du
    else:
        da, db, du = _linear_parts(inner, tangents)
    if du is None:
        (tangent,) = bind(AFFINE, da, db, *inner[2:])
        (tangent,) = bind(SLOPE, tangent, *inner, activation=activation)
        tangent = [tangent.astype(dtype)]
    else:
        tangent = bind(PUSHED, da, db, du, *inner, activation=activation, dtype=dtype, **how)
    return bind(ACTIVATED, *primals, activation=activation, dtype=dtype, **how), tangent


def _pushed_jvp(primals: Any, tangents: Any, *, activation: Any, dtype: Any, **how: Any) -> Any:
    """Linear in the first three; in the others, the derivative of what it is made of."""

    def composed(da: Array, db: Array, du: Array, *inner: Array) -> list[Array]:
        (tangent,) = bind(AFFINE, da, db, *inner[2:])
        (tangent,) = bind(SLOPE, tangent + du, *inner, activation=activation)
        return [tangent.astype(dtype)]

    linear, inner = primals[:3], primals[3:]
    d_linear = [dense(t, p) for t, p in zip(tangents[:3], linear, strict=True)]
    tangent = bind(PUSHED, *d_linear, *inner, activation=activation, dtype=dtype, **how)
    tangent = _with_inner(composed, primals, tangents, 3, tangent)
    return bind(PUSHED, *primals, activation=activation, dtype=dtype, **how), tangent


def _pulled_jvp(primals: Any, tangents: Any, *, activation: Any, shape: Any, **how: Any) -> Any:
    """Linear in the first; in the others, the derivative of what it is made of."""

    def composed(g: Array, *inner: Array) -> list[Array]:
        g = g.astype(inner[0].dtype)
        (g,) = bind(SLOPE, g, *inner, activation=activation)
        return [*bind(SUMS, g, *inner[2:], shape=shape), g]

    parameters: Any = {"activation": activation, "shape": shape, **how}
    tangent = bind(PULLED, dense(tangents[0], primals[0]), *primals[1:], **parameters)
    tangent = _with_inner(composed, primals, tangents, 1, tangent)
    return bind(PULLED, *primals, **parameters), tangent


def _with_inner(f: Any, primals: Any, tangents: Any, linear: int, tangent: Any) -> Any:
    """`tangent`, and what the operands after the first `linear` of `f` add to it."""
    moving = tuple(primals[linear : linear + 5])
    d_moving = tangents[linear : linear + 5]
    if all_zero(*d_moving):
        return tangent
    d_moving = tuple(dense(t, p) for t, p in zip(d_moving, moving, strict=True))
    fixed, mask = primals[:linear], primals[linear + 5 :]
    _, more = jax.jvp(lambda *inner: f(*fixed, *inner, *mask), moving, d_moving)
    return list(map(jnp.add, tangent, more))


def _slope_jvp(primals: Any, tangents: Any, *, activation: Any) -> Any:
    (g, *inner), (dg, *d_inner) = primals, tangents
    (tangent,) = bind(SLOPE, dense(dg, g), *inner, activation=activation)
    if activation is not None and not all_zero(*d_inner[:5]):
        (u,), du = bind(AFFINE, *inner), _affine_tangent(inner, d_inner)
        act = functools.partial(reference.applied, activation)
        _, second = jax.jvp(lambda u: jax.jvp(act, (u,), (g,))[1], (u,), (du,))
        tangent = tangent + reference.counted(second, *inner[5:])
    return bind(SLOPE, *primals, activation=activation), [tangent]


def _sums_transpose(cotangents: Any, g: Any, *centre: Array, shape: tuple[int, ...]) -> Any:
    a, b = (jnp.zeros(shape, g.aval.dtype) if all_zero(ct) else ct for ct in cotangents)
    return [*bind(AFFINE, a, b, *centre), *[None] * len(centre)]


def _affine_transpose(cotangents: Any, a: Any, b: Any, *centre: Array) -> Any:
    linear = [ad.is_undefined_primal(array) for array in (a, b)]
    if all_zero(*cotangents):
        return [None, None, *[None] * len(centre)]
    shape = (a if linear[0] else b).aval.shape
    pair = bind(SUMS, *cotangents, *centre, shape=shape)
    a, b = (ct if wanted else None for ct, wanted in zip(pair, linear, strict=True))
    return [a, b, *[None] * len(centre)]


def _slope_transpose(cotangents: Any, g: Any, *inner: Array, activation: Any) -> Any:
    if all_zero(*cotangents):
        return [None, *[None] * len(inner)]
    return [
        *bind(SLOPE, *cotangents, *inner, activation=activation),
        *[None] * len(inner),
    ]


def _pushed_transpose(
    cotangents: Any, da: Any, db: Any, du: Any, *inner: Array, dtype: Any, **how: Any
) -> Any:
    if all_zero(*cotangents):
        return [None] * (3 + len(inner))
    pulled = bind(PULLED, *cotangents, *inner, shape=da.aval.shape, **how)
    return [*pulled, *[None] * len(inner)]


def _pulled_transpose(
    cotangents: Any, g: Any, *inner: Array, shape: tuple[int, ...], **how: Any
) -> Any:
    if all_zero(*cotangents):
        return [None] * (1 + len(inner))
    linear = [
        jnp.zeros(size, inner[0].dtype) if all_zero(ct) else ct
        for ct, size in zip(cotangents, (shape, shape, g.aval.shape), strict=True)
    ]
    pushed = bind(PUSHED, *linear, *inner, dtype=g.aval.dtype, **how)
    return [*pushed, *[None] * len(inner)]


def dense(tangent: Any, primal: Array) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, ad.Zero) else tangent


def all_zero(*tangents: Any) -> bool:
    return all(isinstance(tangent, ad.Zero) for tangent in tangents)


for _primitive, _jvp in {
    SUMS: _sums_jvp,
    AFFINE: _affine_jvp,
    ACTIVATED: _activated_jvp,
    SLOPE: _slope_jvp,
    PUSHED: _pushed_jvp,
    PULLED: _pulled_jvp,
}.items():
    ad.primitive_jvps[_primitive] = _jvp
for _primitive, _transpose in {
    SUMS: _sums_transpose,
    AFFINE: _affine_transpose,
    SLOPE: _slope_transpose,
    PUSHED: _pushed_transpose,
    PULLED: _pulled_transpose,
}.items():
    ad.primitive_transposes[_primitive] = _transpose
