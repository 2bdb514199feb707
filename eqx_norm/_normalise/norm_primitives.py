"""Defines the passes of `normalise` as primitives of JAX, and their derivatives.

    norm(x, weight, bias, given)                 y = f(weight (x - mean) rstd + bias)
    d_norm(tangents; x, weight, bias, moments)   the derivative of norm, linear in the tangents
    d_norm_t(dy; x, weight, bias, moments)       the transpose of d_norm: gradients

`given` are moments that a strategy has chosen, or none: then the pass computes the moments of x
itself. `moments` are the given ones without `x_upcast`, or those of x by `STATISTICS`; with a
Pallas kernel, none. All may have a mask, which is last. rstd is computed from the variance in
each pass, by the platform's function.

Given moments are `x_upcast, variance, mean, mean_lo`. `x_upcast` is x in the compute dtype.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from eqx_norm._jax import registry
from eqx_norm._jax.lowering import Args, Aval, Target

from .formulas import reference
from .formulas.layout import Example, Layout
from .formulas.reference import Shape, masked, upcast
from .formulas.row_norm import Options, Wanted
from .moments import moments
from .moments_primitives import AFFINE, STATISTICS
from .primitive import abstract_result, bind, new_primitive, sum_to_shape
from .variants import choose

# --- y by the passes of `moments_primitives`, for derivatives without a variant of their own.


def _in_passes(
    x: Float[Array, "*x"],
    others: Sequence[Shaped[Array, "..."]],
    *,
    layout: Layout,
    options: Options,
) -> Callable[..., Float[Array, "*x"]]:
    """Returns y as a function of `x_upcast`, weight and bias, and of variance and mean if they
    are given. `others` are moments, which are read only if given, and the mask, if there is
    one."""
    norm, given = options.norm, options.given
    mean_lo = list(others[2:3]) if given else []
    mask = [v for v in others if v.dtype == bool]

    def of_example(
        x: Float[Array, "*example"],
        x_upcast: Float[Array, "*#example"],
        weight: Float[Array, "*#example"],
        bias: Float[Array, "*#example"],
        *arrays: Shaped[Array, "..."],
    ) -> Float[Array, "*example"]:
        vectors = arrays[: len(arrays) - len(mask)]
        example = Example(x, upcast(x_upcast), arrays[-1] if mask else None, layout)
        if not given:
            used, shape = moments(example, centred=norm.centred), layout.moments_shape
            vectors = used.variance, *used.mean_pair.words(used.variance.dtype)
            vectors = [v.reshape(shape) for v in vectors]
        variance, *mean = vectors
        rstd, x_upcast = reference.rsqrt(variance + norm.eps), example.x_upcast
        (u,) = bind(
            AFFINE, jnp.zeros_like(rstd), rstd, x_upcast, x, *mean, example.mask, layout=layout
        )
        y = u * weight + bias
        if norm.activation is not None:
            y = norm.activation(y)
        return masked(y, example.mask).astype(options.dtype)

    def forward(
        x_upcast: Float[Array, "*#x"],
        weight: Float[Array, "*#x"],
        bias: Float[Array, "*#x"],
        *variance_and_mean: Float[Array, "..."],
    ) -> Float[Array, "*x"]:
        arrays = x, x_upcast, weight, bias, *variance_and_mean, *mean_lo, *mask
        sizes = [",".join(f"n{i}_{j}" for j in range(layout.ndim)) for i in range(len(arrays))]
        operands = ",".join(f"({names})" for names in sizes)
        return jnp.vectorize(of_example, signature=f"{operands}->({sizes[0]})")(*arrays)

    return forward


def _split_operands(
    operands: Sequence[Any], given: bool
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the tangents among the operands of `d_norm`, with dx, and the primals, with x."""
    dx, x, *vectors = operands
    n = 4 if given else 2
    return [dx, *vectors[:n]], [x, *vectors[n:]]


def _tangent(
    *arrays: Shaped[Array, "..."], layout: Layout, options: Options
) -> list[Float[Array, "*x"]]:
    """Computes `d_norm`."""
    tangents, (x, weight, bias, *others) = _split_operands(arrays, options.given)
    primals = [x.astype(tangents[0].dtype), weight, bias]
    if options.given:
        primals += others[:2]
    # An operand and its tangent may be broadcast along different axes.
    pairs = map(jnp.broadcast_arrays, tangents, primals)
    tangents, primals = zip(*pairs, strict=True)
    forward = _in_passes(x, others, layout=layout, options=options)
    return [jax.jvp(forward, primals, tangents)[1]]


def _gradients(
    dy: Float[Array, "*x"],
    x: Float[Array, "*x"],
    weight: Float[Array, "*#x"],
    bias: Float[Array, "*#x"],
    *others: Shaped[Array, "..."],
    layout: Layout,
    options: Options,
    wanted: Wanted,
) -> list[Float[Array, "..."]]:
    """Computes `d_norm_t`, as a function that JAX can differentiate."""
    weights = [weight, bias]
    if wanted.shape is not None:
        weights = [jnp.broadcast_to(w, wanted.shape) for w in weights]
    variance_and_mean = list(others[:2]) if options.given else []
    if wanted.moments_shape is not None:
        shape = wanted.moments_shape
        variance_and_mean = [jnp.broadcast_to(v, shape) for v in variance_and_mean]
    forward = _in_passes(x, others, layout=layout, options=options)
    pull_back = jax.vjp(forward, x.astype(wanted.x_dtype), *weights, *variance_and_mean)[1]
    dx, d_weight, d_bias, *d_moments = pull_back(dy)
    if wanted.moments_shape is None:
        d_moments = []
    return [dx, *wanted.chosen(d_weight, d_bias), *d_moments]


# --- The primitives.


def _type(x: Aval, *arrays: Aval, options: Options, **_: object) -> list[Aval]:
    return [abstract_result([x, *arrays], x, x.shape, options.dtype, x.ndim)]


def _gradient_types(
    dy: Aval,
    x: Aval,
    weight: Aval,
    *_: Aval,
    layout: Layout,
    options: Options,
    wanted: Wanted,
) -> list[Aval]:
    def vector(shape: Shape) -> Aval:
        return abstract_result([x], x, shape, weight.dtype, len(shape) - layout.ndim)

    types = [abstract_result([x, dy], x, x.shape, wanted.x_dtype, x.ndim)]
    if wanted.shape is not None:
        gradient = vector(wanted.shape)
        types += wanted.chosen(gradient, gradient)
    if wanted.moments_shape is not None:
        gradient = vector(wanted.moments_shape)
        types += [gradient, gradient]
    return types


def _shapes_of_moments(x: Shape, *, layout: Layout, options: Options) -> list[Shape]:
    """Returns the shapes of the sums in y: of the moments, unless these are given."""
    return [] if options.given else [layout.own_shape(x)]


def _shapes_of_gradients(
    x: Shape, *, layout: Layout, options: Options, wanted: Wanted
) -> list[Shape]:
    """Returns the shapes of the sums over moments' values, and over weights' values."""
    shape, moments_shape = wanted.shape, wanted.moments_shape
    if moments_shape is None:
        if options.given and shape is None:
            return []
        moments_shape = layout.own_shape(x)
    return [moments_shape] if shape is None else [moments_shape, shape]


def _lower_tangent(
    target: Target, *arrays: Shaped[Array, "..."], layout: Layout, options: Options
) -> list[Float[Array, "*x"]]:
    del target
    return _tangent(*arrays, layout=layout, options=options)


NORM = new_primitive("norm", choose.norm, _type, full=[0], vectors=_shapes_of_moments)
D_NORM = new_primitive("d_norm", _lower_tangent, _type, full=[0, 1])
D_NORM_T = new_primitive(
    "d_norm_t", choose.gradients, _gradient_types, full=[0, 1], vectors=_shapes_of_gradients
)


# --- The derivatives.


def _norm_jvp(
    primals: Args, tangents: Args, *, layout: Layout, options: Options
) -> tuple[Args, Args]:
    x, weight, bias, *others = primals
    dx, d_weight, d_bias, *d_others = tangents
    vector_tangents = [d_weight, d_bias]
    if options.given:
        _, variance, mean, mean_lo, *mask = others
        dx, d_variance, d_mean, d_mean_lo, *_ = d_others
        vector_tangents += [d_variance, _sum(d_mean, d_mean_lo)]
        moments = [variance, mean, mean_lo]
        # With x in place of `x_upcast`, a backward pass that computes y again does not keep
        # `x_upcast`.
        others = [x, *moments, *mask]
    else:
        mask = others
        moments = [] if options.kernel else _own_moments(x, mask, layout, options)
    dx, *vector_tangents = map(registry.instantiate_zeros, [dx, *vector_tangents])
    # `x_upcast` may have size 1 along a mapped axis where x has the full size: `vmap` of an x
    # that all members of an ensemble share.
    dx = jnp.broadcast_to(dx, x.shape)
    (y,) = NORM.bind(x, weight, bias, *others, layout=layout, options=options)
    operands = dx, x, *vector_tangents, weight, bias, *moments, *mask
    return [y], bind(D_NORM, *operands, layout=layout, options=options)


def _own_moments(
    x: Float[Array, "*x"], mask: Sequence[Bool[Array, "*#x"]], layout: Layout, options: Options
) -> list[Float[Array, "..."]]:
    """Returns the variance of each example's groups and, if `centred`, mean and mean_lo."""
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
        (m2,) = found
        return [m2 / n]
    mean, m2, mean_lo = found
    return [m2 / n, mean, mean_lo]


def _sum(a: Any, b: Any) -> Any:
    """Returns the sum of two tangents, a `Zero` if both are."""
    if isinstance(b, registry.Zero):
        return a
    if isinstance(a, registry.Zero):
        return b
    return a + b


def _d_norm_transpose(
    cotangents: Args, *operands: Any, layout: Layout, options: Options
) -> Args:
    (dy,) = cotangents
    if isinstance(dy, registry.Zero):
        return [None for _ in operands]
    tangents, primals = _split_operands(operands, options.given)
    x, weight, bias, *vectors = primals
    avals = [t.aval if registry.is_undefined_primal(t) else None for t in tangents]
    of_x, of_weight, of_bias, *of_moments = avals
    wanted = Wanted(
        shape=_common_shape([of_weight, of_bias], [weight, bias]),
        weight=of_weight is not None,
        bias=of_bias is not None,
        moments_shape=_common_shape(of_moments, vectors[:2]),
        x_dtype=x.dtype if of_x is None else of_x.dtype,
    )
    dx, *found = bind(D_NORM_T, dy, *primals, layout=layout, options=options, wanted=wanted)
    gradients = iter(found)
    d_weight = _next_gradient(gradients, of_weight)
    d_bias = _next_gradient(gradients, of_bias)
    d_moments = [None for _ in of_moments]
    if wanted.moments_shape is not None:
        pairs = zip(gradients, of_moments, strict=True)
        d_moments = [None if v is None else sum_to_shape(ct, v) for ct, v in pairs]
    d_x = None if of_x is None else dx
    d_vectors = [None for _ in (weight, bias, *vectors)]
    return [d_x, None, d_weight, d_bias, *d_moments, *d_vectors]


def _next_gradient(
    gradients: Iterator[Float[Array, "..."]], aval: Aval | None
) -> Float[Array, "..."] | None:
    """Returns the next gradient in the shape of its operand, `None` if it is not wanted."""
    return None if aval is None else sum_to_shape(next(gradients), aval)


def _common_shape(avals: Sequence[Aval | None], primals: Sequence[Array]) -> Shape | None:
    """Returns the shape of gradients that one pass sums, `None` if none is wanted."""
    shapes = [v.shape for v in avals if v is not None]
    if not shapes:
        return None
    return jnp.broadcast_shapes(*shapes, *(p.shape for p in primals))


def _jvp_of(
    passes: Callable[..., list[Array]], primals: Args, tangents: Args
) -> tuple[list[Array], list[Array]]:
    # A mask, which is last, has no tangent.
    n = sum(jnp.issubdtype(p.dtype, jnp.inexact) for p in primals)
    mask = primals[n:]
    tangents = tuple(map(registry.instantiate_zeros, tangents[:n]))
    return jax.jvp(lambda *arrays: passes(*arrays, *mask), tuple(primals[:n]), tangents)


def _d_norm_jvp(
    primals: Args, tangents: Args, *, layout: Layout, options: Options
) -> tuple[Args, Args]:
    passes = functools.partial(_tangent, layout=layout, options=options)
    return _jvp_of(passes, primals, tangents)


def _d_norm_t_jvp(
    primals: Args, tangents: Args, *, layout: Layout, options: Options, wanted: Wanted
) -> tuple[Args, Args]:
    passes = functools.partial(_gradients, layout=layout, options=options, wanted=wanted)
    return _jvp_of(passes, primals, tangents)


registry.derive(NORM, jvp=_norm_jvp)
registry.derive(D_NORM, jvp=_d_norm_jvp, transpose=_d_norm_transpose)
registry.derive(D_NORM_T, jvp=_d_norm_t_jvp)
