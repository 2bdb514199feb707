"""Defines the passes of `normalise` as primitives of JAX, and their derivatives.

    norm(x, weight, bias, ...)            y = f(weight (x - mean) rstd + bias)
    d_norm(tangents; x, weight, bias)     the derivative of norm, linear in the tangents
    d_norm_t(dy; x, weight, bias, ...)    the transpose of d_norm: gradients

`...` are moments that are given (of a batch, chosen by a strategy), or none: then the pass
takes the moments of x itself, and its derivatives take `STATISTICS`. All may have a mask, which
is last. rstd is computed from the variance in each pass, by the platform's function.

Given moments are `x_upcast, variance, mean, mean_rest`. `x_upcast` is x in the compute dtype.
No pass reads `x_upcast`: it is there to be differentiated with respect to, in place of x. A
batch norm's dx has two parts, through y and through the moments of the batch. JAX adds them
where the two uses of x meet; if that were x itself, in bfloat16, each part would be rounded
before the sum, and the two nearly cancel. So both `norm` and `MOMENTS` have the derivative with
respect to `x_upcast`, and only the cast from x to `x_upcast` rounds. XLA removes the cast,
which nothing reads.

`variants.choose` has a variant of y and of the gradients for each platform: the same for y with
a gradient and without. Forward mode and higher orders are those of `moments` and `AFFINE`, by
`_in_passes`.

Arrays have as many axes as x, `(*mapped, *example)`, with size 1 where they are broadcast.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax import registry
from eqx_norm._jax.lowering import Args, Aval, Target

from .formulas import reference
from .formulas.layout import Layout, Values
from .formulas.reference import Shape, masked, upcast
from .formulas.row_norm import Options, Sums
from .moments import moments
from .moments_primitives import AFFINE, STATISTICS
from .primitive import abstract_result, bind, new_primitive, sum_to_shape
from .variants import choose

# --- y by the passes of `moments_primitives`, for derivatives without a variant of their own.


def _in_passes(
    x: Array, others: Sequence[Array], *, layout: Layout, options: Options
) -> Callable[..., Array]:
    """Returns y as a function of `x_upcast`, weight and bias, and of variance and mean if they
    are given. `others` are variance, mean and mean_rest, if given, and the mask, if there is
    one."""
    norm, given = options.norm, options.given
    rest = list(others[2:3]) if given else []
    mask = [v for v in others if v.dtype == bool]

    def example(x: Array, x_upcast: Array, weight: Array, bias: Array, *arrays: Array) -> Array:
        vectors = arrays[: len(arrays) - len(mask)]
        values = Values(x, upcast(x_upcast), arrays[-1] if mask else None, layout)
        if not given:
            used, shape = moments(values, centred=norm.centred), layout.moments_shape
            vectors = used.variance, *used.mean_pair.words(used.variance.dtype)
            vectors = [v.reshape(shape) for v in vectors]
        variance, *mean = vectors
        rstd, x_upcast = reference.rsqrt(variance + norm.eps), values.x_upcast
        (u,) = bind(
            AFFINE, jnp.zeros_like(rstd), rstd, x_upcast, x, *mean, values.mask, layout=layout
        )
        v = u * weight + bias
        y = v if norm.activation is None else norm.activation(v)
        return masked(y, values.mask).astype(options.dtype)

    def forward(x_upcast: Array, weight: Array, bias: Array, *of_moments: Array) -> Array:
        arrays = x, x_upcast, weight, bias, *of_moments, *rest, *mask
        sizes = [",".join(f"n{i}_{j}" for j in range(layout.ndim)) for i in range(len(arrays))]
        operands = ",".join(f"({names})" for names in sizes)
        return jnp.vectorize(example, signature=f"{operands}->({sizes[0]})")(*arrays)

    return forward


def _parted(operands: Sequence[Any], given: bool) -> tuple[list[Any], list[Any]]:
    """Returns the tangents among the operands of `d_norm`, and the others."""
    dx, x, *vectors = operands
    n = 4 if given else 2
    return [dx, *vectors[:n]], [x, *vectors[n:]]


def _tangent(*arrays: Array, layout: Layout, options: Options) -> list[Array]:
    given = options.given
    tangents, (x, weight, bias, *others) = _parted(arrays, given)
    primals = [x.astype(tangents[0].dtype), weight, bias, *(others[:2] if given else ())]
    # An operand and its tangent may be broadcast along different axes.
    pairs = map(jnp.broadcast_arrays, tangents, primals)
    tangents, primals = zip(*pairs, strict=True)
    forward = _in_passes(x, others, layout=layout, options=options)
    return [jax.jvp(forward, primals, tangents)[1]]


def _gradients(
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    layout: Layout,
    options: Options,
    sums: Sums,
) -> list[Array]:
    weights = [weight, bias]
    if sums.shape is not None:
        weights = [jnp.broadcast_to(w, sums.shape) for w in weights]
    given = list(others[:2]) if options.given else []
    if sums.moments_shape is not None:
        given = [jnp.broadcast_to(v, sums.moments_shape) for v in given]
    forward = _in_passes(x, others, layout=layout, options=options)
    pull_back = jax.vjp(forward, x.astype(sums.x_dtype), *weights, *given)[1]
    dx, *of_weights = pull_back(dy)
    of_moments = [] if sums.moments_shape is None else of_weights[2:]
    return [dx, *sums.chosen(*of_weights[:2]), *of_moments]


# --- The primitives.


def _type(x: Aval, *arrays: Aval, options: Options, **_: object) -> list[Aval]:
    return [abstract_result([x, *arrays], x, x.shape, options.dtype, x.ndim)]


def _gradient_types(
    dy: Aval, x: Aval, weight: Aval, *_: Aval, layout: Layout, options: Options, sums: Sums
) -> list[Aval]:
    def vector(shape: Any) -> Aval:
        return abstract_result([x], x, shape, weight.dtype, len(shape) - layout.ndim)

    types = [abstract_result([x, dy], x, x.shape, sums.x_dtype, x.ndim)]
    if sums.shape is not None:
        gradient = vector(sums.shape)
        types += sums.chosen(gradient, gradient)
    if sums.moments_shape is not None:
        types += [vector(sums.moments_shape)] * 2
    return types


def _sums_of_y(x: Shape, *, layout: Layout, options: Options) -> list[Shape]:
    """Returns the shapes of the sums in y: of the moments, unless these are given."""
    return [] if options.given else [layout.own_shape(x)]


def _sums_of_gradients(
    x: Shape, *, layout: Layout, options: Options, sums: Sums
) -> list[Shape]:
    """Returns the shapes of the sums over moments' values, and over weights' values."""
    shape, moments_shape = sums.shape, sums.moments_shape
    if options.given and shape is None and moments_shape is None:
        return []
    of_moments = layout.own_shape(x) if moments_shape is None else moments_shape
    return [of_moments] if shape is None else [of_moments, shape]


def _lowered_tangent(target: Target, *arrays: Array, **static: Any) -> list[Array]:
    del target
    return _tangent(*arrays, **static)


NORM = new_primitive("norm", choose.norm, _type, full=[0], vectors=_sums_of_y)
D_NORM = new_primitive("d_norm", _lowered_tangent, _type, full=[0, 1])
D_NORM_T = new_primitive(
    "d_norm_t", choose.gradients, _gradient_types, full=[0, 1], vectors=_sums_of_gradients
)


# --- The derivatives.


def _norm_jvp(primals: Args, tangents: Args, *, layout: Layout, options: Options) -> Args:
    x, weight, bias, *others = primals
    along: list[Any] = list(tangents[:3])
    if options.given:
        _, variance, mean, rest, *mask = others
        d_x_upcast, d_variance, d_mean, d_rest = tangents[3:7]
        along = [d_x_upcast, *tangents[1:3], d_variance, _sum(d_mean, d_rest)]
        # With x in place of `x_upcast`, a backward pass that computes y again does not keep
        # `x_upcast`.
        others, vectors = [x, variance, mean, rest, *mask], [variance, mean, rest]
    else:
        mask = others
        vectors = [] if options.kernel else _own_moments(x, mask, layout, options)
    dx, *along = map(registry.instantiate_zeros, along)
    # `x_upcast` may have size 1 along a mapped axis where x has the full size: `vmap` of an x
    # that all members of an ensemble share.
    dx = jnp.broadcast_to(dx, x.shape)
    (y,) = NORM.bind(x, weight, bias, *others, layout=layout, options=options)
    at = weight, bias, *vectors, *mask
    return [y], bind(D_NORM, dx, x, *along, *at, layout=layout, options=options)


def _own_moments(
    x: Array, mask: Sequence[Array], layout: Layout, options: Options
) -> list[Array]:
    """Returns the variance of each example's groups and, if `centred`, the mean as a pair."""
    count, *found = bind(
        STATISTICS,
        lax.stop_gradient(x),
        *mask,
        layout=layout,
        shape=layout.own_shape(x.shape),
        centred=options.norm.centred,
        implementation="auto",
        names=(),
    )
    n = jnp.maximum(count, 1) if mask else layout.length
    if not options.norm.centred:
        return [found[0] / n]
    mean, m2, rest = found
    return [m2 / n, mean, rest]


def _sum(a: Any, b: Any) -> Any:
    if isinstance(b, registry.Zero):
        return a
    return b if isinstance(a, registry.Zero) else a + b


def _d_norm_transpose(
    cotangents: Args, *operands: Any, layout: Layout, options: Options
) -> Args:
    if isinstance(cotangents[0], registry.Zero):
        return [None] * len(operands)
    linear, primals = _parted(operands, options.given)
    x, weight, bias, *vectors = primals
    wanted = [o.aval if registry.is_undefined_primal(o) else None for o in linear]
    of_x, of_weights, of_moments = wanted[0], wanted[1:3], wanted[3:]
    sums = Sums(
        shape=_common_shape(of_weights, (weight, bias)),
        of_weight=of_weights[0] is not None,
        of_bias=of_weights[1] is not None,
        moments_shape=_common_shape(of_moments, vectors[:2]),
        x_dtype=x.dtype if of_x is None else of_x.dtype,
    )
    gradients = bind(D_NORM_T, *cotangents, *primals, layout=layout, options=options, sums=sums)
    dx, *found = gradients
    remaining = iter(found)
    d_weights = [None if v is None else sum_to_shape(next(remaining), v) for v in of_weights]
    d_moments: Args = [None] * len(of_moments)
    if sums.moments_shape is not None:
        pairs = zip(remaining, of_moments, strict=True)
        d_moments = [None if v is None else sum_to_shape(ct, v) for ct, v in pairs]
    of_others = [None] * (len(primals) - 1)
    return [None if of_x is None else dx, None, *d_weights, *d_moments, *of_others]


def _common_shape(wanted: Sequence[Aval | None], primals: Sequence[Array]) -> Shape | None:
    """Returns the shape of gradients that one pass sums, `None` if none is wanted."""
    shapes = [v.shape for v in wanted if v is not None]
    return jnp.broadcast_shapes(*shapes, *(p.shape for p in primals)) if shapes else None


def _jvp(passes: Callable[..., Any], primals: Args, tangents: Args, **static: Any) -> Args:
    # A mask, which is last, has no tangent.
    n = sum(jnp.issubdtype(p.dtype, jnp.inexact) for p in primals)
    along = tuple(map(registry.instantiate_zeros, tangents[:n]))
    return jax.jvp(lambda *at: passes(*at, *primals[n:], **static), tuple(primals[:n]), along)


_of_tangent, _of_gradients = (functools.partial(_jvp, f) for f in (_tangent, _gradients))
registry.derive(NORM, jvp=_norm_jvp)
registry.derive(D_NORM, jvp=_of_tangent, transpose=_d_norm_transpose)
registry.derive(D_NORM_T, jvp=_of_gradients)
