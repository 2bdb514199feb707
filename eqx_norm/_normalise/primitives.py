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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from . import reference, totals
from .new_primitive import bind, new_primitive
from .reference import Activation


def statistics(x: Array, mask: Array | None = None) -> tuple[Array, Array, Array, Array]:
    """See `reference.statistics`."""
    count, mean, rest, m2 = bind(_statistics, x, mask)
    return count, mean, rest, m2


def sums(
    g: Array, x: Array, mean: Array, rest: Array, mask: Array | None, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """See `reference.sums`."""
    sum_g, sum_gd = bind(_sums, g, x, mean, rest, mask, shape=shape)
    return sum_g, sum_gd


def affine(
    a: Array, b: Array, x: Array, mean: Array, rest: Array, mask: Array | None = None
) -> Array:
    """See `reference.affine`."""
    return bind(_affine, a, b, x, mean, rest, mask)[0]


def activated(
    activation: Activation,
    a: Array,
    b: Array,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None = None,
) -> Array:
    """See `reference.activated`; `activation` must not close over traced arrays."""
    return bind(_activated, a, b, x, mean, rest, mask, activation=activation)[0]


def again(
    a: Array, b: Array, x: Array, mean: Array, rest: Array, mask: Array | None = None
) -> Array:
    """The same as `affine`, but what XLA has computed before is not kept for it."""
    a, b, mean, rest = _again.bind(a, b, mean, rest)
    return affine(a, b, x, mean, rest, mask)


def tangent(activation: Activation | None, operands: Any, tangents: Any) -> Array:
    """The tangent of `activated`, or of `affine`, for operands without a `None`.

    Their own derivative, except that the tangent of x may be of a higher precision than x.
    """
    if activation is None:
        return _affine_jvp(operands, tangents)[1][0]
    return _activated_jvp(operands, tangents, activation=activation)[1][0]


# --- What they compute.


def _affine_of(*arrays: Array) -> list[Array]:
    return [reference.affine(*arrays)]


def _activated_of(*arrays: Array, activation: Activation) -> list[Array]:
    return [reference.activated(activation, *arrays)]


def _slope_of(*arrays: Array, activation: Activation) -> list[Array]:
    return [reference.slope(activation, *arrays)]


def _slope_elsewhere(
    g: Array, a: Array, b: Array, x: Array, *rest: Array, activation: Activation
) -> list[Array]:
    """For a GPU, where XLA writes out a mask that two passes need.

    Where nothing but columns is summed, that costs 2.5 times reading x in bfloat16; as a
    product the slope of a ReLU is computed again. (Between convolutions the product costs
    more: see experiments/results/gpu_compile.csv.)
    """
    if activation is jax.nn.relu and x.shape[-1] == 1:
        return [g * jnp.sign(reference.activated(activation, a, b, x, *rest))]
    return _slope_of(g, a, b, x, *rest, activation=activation)


def _pushed_of(da: Array, db: Array, du: Array, *inner: Array, activation: Any) -> list[Array]:
    _, _, x, mean, rest, *_ = inner
    return _slope_of(
        reference.affine(da, db, x, mean, rest) + du, *inner, activation=activation
    )


def _pulled_of(
    g: Array, *inner: Array, activation: Activation, shape: Any, total: totals.Total, slope: Any
) -> list[Array]:
    (g,) = slope(g, *inner, activation=activation)
    _, _, *centre = inner
    return [*reference.sums(g, *centre, shape=shape, total=total), g]


_statistics = new_primitive(
    "statistics",
    reference.statistics,
    functools.partial(reference.statistics, total=totals.by_tree),
    lambda x, *_: [((*x.shape[:-3], x.shape[-2]), reference.compute_dtype(x.dtype))] * 4,
    full=[0],
)
_sums = new_primitive(
    "sums",
    reference.sums,
    functools.partial(reference.sums, total=totals.by_tree),
    lambda g, *_, shape: [(shape, g.dtype)] * 2,
    full=[0, 1],
)
_affine = new_primitive(
    "affine", _affine_of, _affine_of, lambda a, b, x, *_: [(x.shape, a.dtype)], full=[2]
)
_activated = new_primitive(
    "activated",
    _activated_of,
    _activated_of,
    lambda a, b, x, *_, activation: [(x.shape, a.dtype)],
    full=[2],
)
_slope = new_primitive(
    "slope",
    _slope_elsewhere,
    _slope_of,
    lambda g, *_, activation: [(g.shape, g.dtype)],
    full=[0, 3],
)
_pushed = new_primitive(
    "pushed",
    _pushed_of,
    _pushed_of,
    lambda da, db, du, *_, activation: [(du.shape, du.dtype)],
    full=[2, 5],
)
_pulled = new_primitive(
    "pulled",
    functools.partial(_pulled_of, total=totals.plain, slope=_slope_elsewhere),
    functools.partial(_pulled_of, total=totals.by_tree, slope=_slope_of),
    lambda g, *_, activation, shape: [(shape, g.dtype)] * 2 + [(g.shape, g.dtype)],
    full=[0, 3],
)


# The same vectors, as if they were others. On a GPU, XLA would otherwise keep what the forward
# pass has computed of them and x, rather than compute it again. A CPU does so anyway. (Not x
# itself: that would be kept twice, once as each.)
_again = Primitive("eqx_norm_again")
_again.multiple_results = True
_again.def_impl(lambda *arrays: arrays)
_again.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(_again, mlir.lower_fun(lambda *a: lax.optimization_barrier(a), True))
mlir.register_lowering(_again, lambda context, *arrays: arrays, platform="cpu")
batching.primitive_batchers[_again] = lambda arrays, axes: (_again.bind(*arrays), axes)
ad.primitive_jvps[_again] = lambda primals, tangents: (_again.bind(*primals), tangents)


# --- Derivatives. Those in what a primitive is linear in are primitives again; the others are
# ordinary operations, which JAX differentiates and transposes as usual.


def _sums_jvp(primals: Any, tangents: Any, *, shape: tuple[int, ...]) -> Any:
    g, x, mean, rest, *mask = primals
    dg, dx, dmean, drest, *_ = tangents
    d_sum, d_sum_d = _sums.bind(_dense(dg, g), x, mean, rest, *mask, shape=shape)
    if not _all_zero(dx, dmean, drest):
        dd = reference.centred(_dense(dx, x), _dense(dmean, mean), _dense(drest, rest))
        axes = tuple(i for i, size in enumerate(shape) if size != g.shape[i])
        d_sum_d = d_sum_d + reference.counted(g * dd, *mask).sum(axes, keepdims=True)
    return _sums.bind(*primals, shape=shape), [d_sum, d_sum_d]


def _affine_jvp(primals: Any, tangents: Any) -> Any:
    tangent = [_affine_tangent(primals, tangents)]
    if len(primals) > 5:
        # A selection would keep the mask for each channel; `slope` makes its own.
        tangent = _slope.bind(*tangent, *primals, activation=_unchanged)
    return _affine.bind(*primals), tangent


def _affine_tangent(primals: Any, tangents: Any) -> Array:
    """Of `affine`; where the mask is false it may be anything."""
    da, db, du = _linear_parts(primals, tangents)
    (tangent,) = _affine.bind(da, db, *primals[2:])
    return tangent if du is None else tangent + du


def _linear_parts(primals: Any, tangents: Any) -> tuple[Array, Array, Array | None]:
    """The tangent of `affine` is `affine(da, db) + du`."""
    a, b, _, mean, rest, *_ = primals
    da, db, dx, dmean, drest, *_ = tangents
    da, db = _dense(da, a), _dense(db, b)
    if not _all_zero(dmean, drest):
        # Part of the shift, so that its transpose is part of the same sums.
        da = da - b * (_dense(dmean, mean) + _dense(drest, rest))
    da, db = jnp.broadcast_arrays(da, db)
    return da, db, None if _all_zero(dx) else b * dx.astype(b.dtype)


def _unchanged(x: Array) -> Array:
    return x


def _activated_jvp(primals: Any, tangents: Any, *, activation: Activation) -> Any:
    a, b, x, mean, rest, *mask = primals
    a, b, mean, rest = _again.bind(a, b, mean, rest)
    inner = (a, b, x, mean, rest, *mask)
    da, db, du = _linear_parts(inner, tangents)
    if du is None:
        (tangent,) = _affine.bind(da, db, *inner[2:])
        tangent = _slope.bind(tangent, *inner, activation=activation)
    else:
        tangent = _pushed.bind(da, db, du, *inner, activation=activation)
    return _activated.bind(*primals, activation=activation), tangent


def _pushed_jvp(primals: Any, tangents: Any, *, activation: Activation) -> Any:
    """Linear in the first three; in the others, the derivative of what it is made of."""

    def composed(da: Array, db: Array, du: Array, *inner: Array) -> list[Array]:
        (tangent,) = _affine.bind(da, db, *inner[2:])
        return _slope.bind(tangent + du, *inner, activation=activation)

    linear, inner = primals[:3], primals[3:]
    d_linear = [_dense(t, p) for t, p in zip(tangents[:3], linear, strict=True)]
    tangent = _pushed.bind(*d_linear, *inner, activation=activation)
    tangent = _with_inner(composed, primals, tangents, 3, tangent)
    return _pushed.bind(*primals, activation=activation), tangent


def _pulled_jvp(primals: Any, tangents: Any, *, activation: Activation, shape: Any) -> Any:
    """Likewise, linear in the first."""

    def composed(g: Array, *inner: Array) -> list[Array]:
        (g,) = _slope.bind(g, *inner, activation=activation)
        return [*_sums.bind(g, *inner[2:], shape=shape), g]

    parameters: Any = {"activation": activation, "shape": shape}
    tangent = _pulled.bind(_dense(tangents[0], primals[0]), *primals[1:], **parameters)
    tangent = _with_inner(composed, primals, tangents, 1, tangent)
    return _pulled.bind(*primals, **parameters), tangent


def _with_inner(f: Any, primals: Any, tangents: Any, linear: int, tangent: Any) -> Any:
    """`tangent`, and what the operands after the first `linear` of `f` add to it."""
    moving = tuple(primals[linear : linear + 5])
    d_moving = tangents[linear : linear + 5]
    if _all_zero(*d_moving):
        return tangent
    dense = tuple(_dense(t, p) for t, p in zip(d_moving, moving, strict=True))
    fixed, mask = primals[:linear], primals[linear + 5 :]
    _, more = jax.jvp(lambda *inner: f(*fixed, *inner, *mask), moving, dense)
    return list(map(jnp.add, tangent, more))


def _slope_jvp(primals: Any, tangents: Any, *, activation: Activation) -> Any:
    (g, *inner), (dg, *d_inner) = primals, tangents
    (tangent,) = _slope.bind(_dense(dg, g), *inner, activation=activation)
    if not _all_zero(*d_inner[:5]):
        (u,), du = _affine.bind(*inner), _affine_tangent(inner, d_inner)
        _, second = jax.jvp(lambda u: jax.jvp(activation, (u,), (g,))[1], (u,), (du,))
        tangent = tangent + reference.counted(second, *inner[5:])
    return _slope.bind(*primals, activation=activation), [tangent]


def _sums_transpose(cotangents: Any, g: Any, *centre: Array, shape: tuple[int, ...]) -> Any:
    a, b = (jnp.zeros(shape, g.aval.dtype) if _all_zero(ct) else ct for ct in cotangents)
    return [*_affine.bind(a, b, *centre), *[None] * len(centre)]


def _affine_transpose(cotangents: Any, a: Any, b: Any, *centre: Array) -> Any:
    linear = [ad.is_undefined_primal(array) for array in (a, b)]
    if _all_zero(*cotangents):
        return [None, None, *[None] * len(centre)]
    shape = (a if linear[0] else b).aval.shape
    pair = _sums.bind(*cotangents, *centre, shape=shape)
    a, b = (ct if wanted else None for ct, wanted in zip(pair, linear, strict=True))
    return [a, b, *[None] * len(centre)]


def _slope_transpose(cotangents: Any, g: Any, *inner: Array, activation: Activation) -> Any:
    if _all_zero(*cotangents):
        return [None, *[None] * len(inner)]
    return [*_slope.bind(*cotangents, *inner, activation=activation), *[None] * len(inner)]


def _pushed_transpose(
    cotangents: Any, da: Any, db: Any, du: Any, *inner: Array, activation: Activation
) -> Any:
    if _all_zero(*cotangents):
        return [None] * (3 + len(inner))
    pulled = _pulled.bind(*cotangents, *inner, activation=activation, shape=da.aval.shape)
    return [*pulled, *[None] * len(inner)]


def _pulled_transpose(
    cotangents: Any, g: Any, *inner: Array, activation: Activation, shape: Any
) -> Any:
    if _all_zero(*cotangents):
        return [None] * (1 + len(inner))
    shapes = (shape, shape, g.aval.shape)
    linear = [
        jnp.zeros(shape, g.aval.dtype) if _all_zero(ct) else ct
        for ct, shape in zip(cotangents, shapes, strict=True)
    ]
    return [*_pushed.bind(*linear, *inner, activation=activation), *[None] * len(inner)]


def _dense(tangent: Any, primal: Array) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, ad.Zero) else tangent


def _all_zero(*tangents: Any) -> bool:
    return all(isinstance(tangent, ad.Zero) for tangent in tangents)


for _primitive, _jvp in {
    _sums: _sums_jvp,
    _affine: _affine_jvp,
    _activated: _activated_jvp,
    _slope: _slope_jvp,
    _pushed: _pushed_jvp,
    _pulled: _pulled_jvp,
}.items():
    ad.primitive_jvps[_primitive] = _jvp
for _primitive, _transpose in {
    _sums: _sums_transpose,
    _affine: _affine_transpose,
    _slope: _slope_transpose,
    _pushed: _pushed_transpose,
    _pulled: _pulled_transpose,
}.items():
    ad.primitive_transposes[_primitive] = _transpose
