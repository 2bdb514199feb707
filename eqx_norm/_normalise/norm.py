"""Defines the one operation of all layers, `normalise`, and its derivatives.

    norm(x, weight, bias, ...)            y = f(weight (x - mean) rstd + bias)
    d_norm(tangents; x, weight, bias)     the derivative of norm, linear in the tangents
    d_norm_t(dy; x, weight, bias, ...)    the transpose of d_norm: gradients
    rstd_and_mean(x)                      x's own moments, for the backward pass

`...` are moments that are given (of a batch, chosen by a strategy), or none: then the pass takes
the moments of x itself. All may have a mask, which is last. Given moments are
`wide, rstd, mean, mean_rest`: `wide` is x in the compute dtype, which is not read. The derivative
is with respect to `wide`, so that cotangents through y and through the moments are added in the
compute dtype, and rounded once.

`forms.choose` has a form of y and of the gradients for each platform. y has the
same form whether it is differentiated or not. Forward mode and higher orders are those of
`moments` and `AFFINE`, by `_in_passes`.

Arrays have as many axes as x, `(*mapped, *example)`, with size 1 where they are broadcast.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax import registry
from eqx_norm._jax.collectives import AxisName
from eqx_norm._jax.lowering import Args, Aval, Target
from eqx_norm.strategies import Moments

from .derivatives.moments_and_affine import AFFINE
from .derivatives.new_primitive import bind, fitted, new_primitive, typed
from .forms import choose
from .formulas import reference
from .formulas.activation import Activation, applied, elementwise
from .formulas.layout import Layout
from .formulas.reference import Shape, compute_dtype, masked, widened
from .formulas.row_norm import RowNorm
from .kernels import rows
from .moments import moments
from .values import Values


class Affine(NamedTuple):
    """Holds the map from standardised values u to y: `activation(weight * u + bias)`. A weight
    or bias has one number per channel or one per value."""

    weight: Array | None = None
    bias: Array | None = None
    activation: Activation | None = None


def normalise(
    values: Values,
    affine: Affine,
    used: Moments | None = None,
    axis_name: AxisName = (),
    *,
    eps: float,
    centred: bool = True,
    implementation: str = "auto",
) -> Array:
    r"""Returns $\text{activation}((x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} +
    \text{bias})$, with $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the dtype
    of `x`; 0 where the mask is false.

    **Arguments:** `used`: moments with one number per group; by default those of the example
    itself, over all its parts along `axis_name`, and not `centred` if its mean counts as 0.
    """
    (x, wide, mask, layout), (weight, bias, activation) = values, affine
    is_complex = jnp.iscomplexobj(x)
    function = None
    if activation is not None and not is_complex:
        function = elementwise(activation, x.shape, wide.dtype)
    is_kernel = implementation == "pallas"
    if is_kernel:
        rows.check(x, mask, layout, axis_name, activation, function)
    if used is None and (is_complex or axis_name != ()):
        used = moments(values, axis_name, centred=centred)
    if is_complex and used is not None:
        y = functools.partial(_in_jax_numpy, values, activation=activation)
        # A barrier before each vector, but not before x, which would then be saved twice.
        y = jax.checkpoint(y, prevent_cse=(True,) * 3)
        return y(_spread(used, eps, values), *like_x((weight, bias), values))

    given = []
    if used is not None:
        vectors = _vectors(used, eps, values)
        given = [wide, *vectors]
    vectors = _weights(values, weight, bias, is_kernel)
    norm = RowNorm(eps, centred or used is not None, function)
    in_pass = functools.partial(
        bind,
        NORM,
        x,
        layout=layout,
        norm=norm,
        given=used is not None,
        adjacent=True,
        kernel=is_kernel,
    )
    if activation is None or function is not None:
        return in_pass(*vectors, *given, mask, dtype=x.dtype)[0]

    # A function that may not be elementwise is computed after the pass, and again for its
    # derivative, so that x is still the only residual of its size.
    def applied_after(vectors: list[Array], given: list[Array]) -> Array:
        (v,) = in_pass(*vectors, *given, mask, dtype=wide.dtype)
        return masked(applied(activation, v), mask).astype(x.dtype)

    return jax.checkpoint(applied_after)(vectors, given)


def _vectors(
    used: Moments, eps: float, values: Values, rsqrt: Callable[[Array], Array] = reference.rsqrt
) -> list[Array]:
    """Returns rstd, mean and mean_rest of each group, with as many axes as x."""
    dtype, shape = values.wide.dtype, values.layout.moments_shape
    vectors = rsqrt(used.variance + eps).astype(dtype), *used.mean_pair.words(dtype)
    return [v.reshape(shape) for v in vectors]


def _spread(used: Moments, eps: float, values: Values, *rsqrt: Any) -> list[Array]:
    """Returns rstd, mean and mean_rest of each channel."""
    return [*map(values.layout.spread, _vectors(used, eps, values, *rsqrt))]


def _weights(
    values: Values, weight: Array | None, bias: Array | None, is_kernel: bool
) -> list[Array]:
    """Returns weight and bias, 1 and 0 by default, with as many axes as x. If either has a
    number for each value, both have."""
    x, layout = values.x, values.layout
    given = like_x((weight, bias), values)
    # A kernel takes a weight of each value, or one of each group.
    in_full = is_kernel and (layout.groups == 1 or layout.channels != layout.groups)
    in_full |= x.ndim > 0 and any(v is not None and v.shape == x.shape for v in given)
    vectors = []
    for vector, default in zip(given, (1, 0), strict=True):
        if vector is None:
            vectors.append(jnp.full((1,) * x.ndim, default, values.wide.dtype))
        else:
            vectors.append(jnp.broadcast_to(vector, x.shape) if in_full else layout.weights(vector))
    return vectors


def like_x(vectors: Sequence[Array | None], values: Values) -> list[Array | None]:
    """Returns each weight or bias with as many axes as x, in the compute dtype."""

    def reshaped(vector: Array) -> Array:
        shape = vector.shape if vector.ndim == values.x.ndim else values.layout.weights_shape
        shape = values.x.shape if vector.size == values.x.size else shape
        return vector.reshape(shape).astype(values.wide.dtype)

    return [None if vector is None else reshaped(vector) for vector in vectors]


def normalise_in_jax_numpy(
    values: Values, used: Moments, affine: Affine, *, eps: float
) -> Array:
    """Returns the result of `normalise`, computed by JAX's own operations, so that other tools
    can read the program."""
    columns = _spread(used, eps, values, lambda variance: 1 / jnp.sqrt(variance))
    weight, bias = like_x(affine[:2], values)
    return _in_jax_numpy(values, columns, weight, bias, activation=affine.activation)


def _in_jax_numpy(
    values: Values,
    columns: list[Array],
    weight: Array | None,
    bias: Array | None,
    *,
    activation: Activation | None,
) -> Array:
    """Returns y by one formula; `columns` are rstd, mean and mean_rest."""
    (x, wide, mask, _), (rstd, mean, mean_rest) = values, columns
    # JAX's derivative of a selection is NaN where the unselected value is NaN.
    u = reference.centred(masked(wide, mask), mean, mean_rest)
    u = u * (rstd if weight is None else rstd * weight)
    u = u if bias is None else u + bias
    y = applied(activation, u)
    return masked(y, mask).astype(x.dtype)


# --- The same by the passes of `moments_and_affine`, for derivatives without a form of their own.


def _in_passes(
    x: Array,
    others: Sequence[Array],
    *,
    layout: Layout,
    norm: RowNorm,
    given: bool,
    dtype: Any,
    **_: object,
) -> Callable[..., Array]:
    """Returns y as a function of `wide`, weight and bias, and of rstd and mean if they are
    given. `others` are rstd, mean and mean_rest, if given, and the mask, if there is one."""
    rest = list(others[2:3]) if given else []
    mask = [v for v in others if v.dtype == bool]

    def example(x: Array, wide: Array, weight: Array, bias: Array, *arrays: Array) -> Array:
        vectors = arrays[: len(arrays) - len(mask)]
        values = Values(x, widened(wide), arrays[-1] if mask else None, layout)
        if not given:
            used = moments(values, centred=norm.centred)
            vectors = _vectors(used, norm.eps, values)
        rstd, *mean = vectors
        scale, wide = (jnp.zeros_like(rstd), rstd), values.wide
        (u,) = bind(AFFINE, *scale, wide, x, *mean, values.mask, layout=layout)
        v = u * weight + bias
        y = v if norm.activation is None else norm.activation(v)
        return masked(y, values.mask).astype(dtype)

    def forward(wide: Array, weight: Array, bias: Array, *of_moments: Array) -> Array:
        arrays = x, wide, weight, bias, *of_moments, *rest, *mask
        sizes = [",".join(f"n{i}_{j}" for j in range(layout.ndim)) for i in range(len(arrays))]
        operands = ",".join(f"({names})" for names in sizes)
        return jnp.vectorize(example, signature=f"{operands}->({sizes[0]})")(*arrays)

    return forward


def _parted(operands: Sequence[Any], given: bool) -> tuple[list[Any], list[Any]]:
    """Returns the tangents among the operands of `d_norm`, and the others."""
    dx, x, *vectors = operands
    n = 4 if given else 2
    return [dx, *vectors[:n]], [x, *vectors[n:]]


def _tangent(*arrays: Array, given: bool, **static: Any) -> list[Array]:
    along, (x, weight, bias, *others) = _parted(arrays, given)
    at = [x.astype(along[0].dtype), weight, bias, *(others[:2] if given else ())]
    # An operand and its tangent may be broadcast along different axes.
    pairs = map(jnp.broadcast_arrays, along, at)
    along, at = zip(*pairs, strict=True)
    forward = _in_passes(x, others, given=given, **static)
    return [jax.jvp(forward, at, along)[1]]


def _gradients(
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    given: bool,
    shape: Shape | None,
    moments_shape: Shape | None,
    wanted: Sequence[bool],
    dx_dtype: Any,
    **static: Any,
) -> list[Array]:
    weights = [w if shape is None else jnp.broadcast_to(w, shape) for w in (weight, bias)]
    given_moments = list(others[:2]) if given else []
    if moments_shape is not None:
        given_moments = [jnp.broadcast_to(v, moments_shape) for v in given_moments]
    forward = _in_passes(x, others, given=given, **static)
    pull_back = jax.vjp(forward, x.astype(dx_dtype), *weights, *given_moments)[1]
    dx, d_weight, d_bias, *of_moments = pull_back(dy)
    results = [dx]
    if wanted[0]:
        results.append(d_weight)
    if wanted[1]:
        results.append(d_bias)
    return results if moments_shape is None else [*results, *of_moments]


# --- The primitives.


def _type(x: Aval, *arrays: Aval, dtype: Any, **_: object) -> list[Aval]:
    return [typed([x, *arrays], x, x.shape, dtype, x.ndim)]


def _tangent_type(dx: Aval, *arrays: Aval, dtype: Any, **_: object) -> list[Aval]:
    return [typed([dx, *arrays], dx, dx.shape, dtype, dx.ndim)]


def _gradient_types(
    dy: Aval,
    x: Aval,
    weight: Aval,
    *_: Aval,
    layout: Layout,
    shape: Shape | None,
    moments_shape: Shape | None,
    wanted: Sequence[bool],
    dx_dtype: Any,
    **_static: object,
) -> list[Aval]:
    def vector(shape: Any) -> Aval:
        return typed([x], x, shape, weight.dtype, len(shape) - layout.ndim)

    types = [typed([x, dy], x, x.shape, dx_dtype, x.ndim)]
    if shape is not None:
        types += [vector(shape)] * sum(wanted)
    if moments_shape is not None:
        types += [vector(moments_shape)] * 2
    return types


def _sums_of_y(x: Shape, *, layout: Layout, given: bool = False, **_: object) -> list[Shape]:
    """Returns the shapes of the sums in y: of the moments, unless these are given."""
    return [] if given else [layout.own_shape(x)]


def _sums_of_gradients(
    x: Shape,
    *,
    layout: Layout,
    given: bool,
    shape: Shape | None,
    moments_shape: Shape | None,
    **_: object,
) -> list[Shape]:
    """Returns the shapes of the sums over moments' values, and over weights' values."""
    if given and shape is None and moments_shape is None:
        return []
    of_moments = layout.own_shape(x) if moments_shape is None else moments_shape
    return [of_moments] if shape is None else [of_moments, shape]


def _vector_types(x: Aval, *mask: Aval, layout: Layout, centred: bool, **_: object) -> Any:
    shape, dtype = layout.own_shape(x.shape), compute_dtype(x.dtype)
    return [typed([x, *mask], x, shape, dtype, x.ndim - layout.ndim)] * (3 if centred else 1)


def _lowered_tangent(target: Target, *arrays: Array, **static: Any) -> list[Array]:
    del target
    return _tangent(*arrays, **static)


RSTD_AND_MEAN = new_primitive(
    "rstd_and_mean", choose.rstd_and_mean, _vector_types, full=[0], vectors=_sums_of_y
)
NORM = new_primitive("norm", choose.norm, _type, full=[0], vectors=_sums_of_y)
D_NORM = new_primitive("d_norm", _lowered_tangent, _tangent_type, full=[0, 1])
D_NORM_T = new_primitive(
    "d_norm_t",
    choose.gradients,
    _gradient_types,
    full=[0, 1],
    vectors=_sums_of_gradients,
)


# --- The derivatives.


def _norm_jvp(primals: Args, tangents: Args, *, given: bool, kernel: bool, **static: Any) -> Args:
    x, weight, bias, *others = primals
    along, static = list(tangents[:3]), {"given": given, "kernel": kernel, **static}
    if given:
        _, rstd, mean, rest, *mask = others
        d_wide, d_rstd, d_mean, d_rest = tangents[3:7]
        along = [d_wide, *tangents[1:3], d_rstd, _sum(d_mean, d_rest)]
        # With x in place of `wide`, no backward pass that computes y again keeps `wide`.
        others, vectors = [x, rstd, mean, rest, *mask], [rstd, mean, rest]
    elif kernel:
        mask, vectors = others, []
    else:
        mask, norm, constant = others, static["norm"], lax.stop_gradient(x)
        eps, centred, layout = norm.eps, norm.centred, static["layout"]
        vectors = bind(RSTD_AND_MEAN, constant, *mask, layout=layout, eps=eps, centred=centred)
    dx, *along = map(registry.instantiate_zeros, along)
    (y,) = NORM.bind(x, weight, bias, *others, **static)
    return [y], bind(D_NORM, dx, x, *along, weight, bias, *vectors, *mask, **static)


def _sum(a: Any, b: Any) -> Any:
    if isinstance(b, registry.Zero):
        return a
    return b if isinstance(a, registry.Zero) else a + b


def _d_norm_transpose(cotangents: Args, *operands: Any, given: bool, **static: Any) -> Args:
    if isinstance(cotangents[0], registry.Zero):
        return [None] * len(operands)
    linear, primals = _parted(operands, given)
    x, weight, bias, *vectors = primals
    wanted = [o.aval if registry.is_undefined_primal(o) else None for o in linear]
    of_x, of_weights, of_moments = wanted[0], wanted[1:3], wanted[3:]

    def common(wanted: Sequence[Aval | None], primals: Sequence[Array]) -> Shape | None:
        shapes = [v.shape for v in wanted if v is not None]
        if not shapes:
            return None
        return jnp.broadcast_shapes(*shapes, *(p.shape for p in primals))

    shape = common(of_weights, (weight, bias))
    moments_shape = common(of_moments, vectors[:2])
    dx, *sums = bind(
        D_NORM_T,
        *cotangents,
        *primals,
        given=given,
        shape=shape,
        moments_shape=moments_shape,
        wanted=tuple(v is not None for v in of_weights),
        dx_dtype=x.dtype if of_x is None else of_x.dtype,
        **static,
    )
    gradients, sums = [], iter(sums)
    for v in of_weights:
        gradients.append(None if v is None else fitted(next(sums), v))
    for v in of_moments:
        d_vector = None if moments_shape is None else next(sums)
        gradients.append(None if v is None else fitted(d_vector, v))
    return [None if of_x is None else dx, None, *gradients, *[None] * (len(primals) - 1)]


def _jvp(passes: Callable[..., Any], primals: Args, tangents: Args, **static: Any) -> Args:
    # A mask, which is last, has no tangent.
    n = sum(jnp.issubdtype(p.dtype, jnp.inexact) for p in primals)
    at, along = tuple(primals[:n]), tuple(map(registry.instantiate_zeros, tangents[:n]))
    return jax.jvp(lambda *at: passes(*at, *primals[n:], **static), at, along)


_of_tangent, _of_gradients = (functools.partial(_jvp, f) for f in (_tangent, _gradients))
registry.derive(NORM, jvp=_norm_jvp)
registry.derive(D_NORM, jvp=_of_tangent, transpose=_d_norm_transpose)
registry.derive(D_NORM_T, jvp=_of_gradients)
