"""Normalises one example by its own moments, by four primitives:

    rstd_and_mean(x)                                    for the backward pass
    norm(x, weight, bias)                               y
    d_norm(dx, d_weight, d_bias; x, weight, bias, ...)  the derivative of norm
    d_norm_t(dy; x, weight, bias, ...)                  the transpose of d_norm: gradients

with `...` rstd and mean (a kernel computes them again), and the mask, if there is one.
`forms.choice_for_examples` has a form of y and of the gradients for each platform. y has the
same form whether it is differentiated or not. All other derivatives, forward mode and higher
orders, are those of `moments` and `normalise`.

As in `derivatives.moments_and_affine`, arrays have as many axes as x, with size 1 where they
are broadcast. `d_norm_t` sums over mapped axes of size 1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax import registry
from eqx_norm._jax.collectives import AxisName
from eqx_norm._jax.lowering import Args, Aval, Target

from .derivatives.moments_and_affine import fitted, typed
from .derivatives.new_primitive import bind, new_primitive
from .forms import choice_for_examples, example_passes
from .formulas.activation import elementwise
from .formulas.layout import Layout
from .formulas.reference import Shape, compute_dtype, widened
from .formulas.row_norm import RowNorm
from .kernels import rows
from .moments import moments
from .normalise import Affine, like_x, normalise
from .values import Values


def normalise_example(
    values: Values,
    affine: Affine,
    axis_name: AxisName = (),
    *,
    eps: float,
    centred: bool,
    implementation: str = "auto",
) -> Array:
    """Returns the example, normalised by its moments over all its parts along `axis_name`."""
    (x, wide, mask, layout), (weight, bias, activation) = values, affine
    kernel = implementation == "pallas"
    function = None
    if activation is not None and not jnp.iscomplexobj(x):
        function = elementwise(activation, x.shape, wide.dtype)
    norm = RowNorm(eps, centred, function)
    if kernel:
        rows.check(x, mask, layout, axis_name, activation, function)
    # Parts of examples, complex numbers, and functions that may not be elementwise.
    is_fused = (activation is None) == (function is None)
    if axis_name != () or jnp.iscomplexobj(x) or not is_fused or x.ndim == 0:
        return normalise(values, moments(values, axis_name, centred=centred), affine, eps=eps)

    defaults = (jnp.full((1,) * x.ndim, number, wide.dtype) for number in (1, 0))
    given = like_x((weight, bias), values)
    vectors = [d if v is None else v for d, v in zip(defaults, given, strict=True)]
    # A kernel takes a weight of each value, or one of each group.
    in_kernel = kernel and (layout.groups == 1 or layout.channels != layout.groups)
    if in_kernel or any(v.shape == x.shape for v in vectors):
        absent = weight is None, bias is None
        pairs = zip(vectors, absent, strict=True)
        vectors = [v if is_absent else jnp.broadcast_to(v, x.shape) for v, is_absent in pairs]
    static: Any = {"layout": layout, "norm": norm, "adjacent": True, "kernel": kernel}
    return bind(NORM, x, *vectors, mask, **static)[0]


# --- The passes, for derivatives that have no form of their own.


def _forward(*arrays: Array, layout: Layout, norm: RowNorm) -> list[Array]:
    def example(x: Array, weight: Array, bias: Array, *mask: Array) -> Array:
        values = Values(x, widened(x), mask[0] if mask else None, layout)
        used = moments(values, centred=norm.centred)
        return normalise(values, used, Affine(weight, bias, norm.activation), eps=norm.eps)

    sizes = [",".join(f"n{i}_{j}" for j in range(layout.ndim)) for i in range(len(arrays))]
    operands = ",".join(f"({names})" for names in sizes)
    return [jnp.vectorize(example, signature=f"{operands}->({sizes[0]})")(*arrays)]


def _passes(arrays: Sequence[Array], layout: Layout, norm: RowNorm) -> Any:
    """Returns x, weight and bias, and y as a function of them, given rstd, mean and mask."""
    mask = [v for v in arrays if v.dtype == bool]
    forward = functools.partial(_forward, layout=layout, norm=norm)
    return arrays[:3], lambda *at: forward(*at, *mask)


def _tangent(*arrays: Array, layout: Layout, norm: RowNorm, **_: object) -> list[Array]:
    at, forward = _passes(arrays[3:], layout, norm)
    # An operand and its tangent may be broadcast along different axes.
    pairs = map(jnp.broadcast_arrays, arrays[:3], at)
    along, at = zip(*pairs, strict=True)
    return jax.jvp(forward, at, along)[1]


def _gradients(
    dy: Array,
    *arrays: Array,
    layout: Layout,
    norm: RowNorm,
    shape: Shape,
    wanted: Sequence[bool],
    **_: object,
) -> list[Array]:
    (x, *vectors), forward = _passes(arrays, layout, norm)
    at = [jnp.broadcast_to(v, shape) if shape else v for v in vectors]
    dx, *sums = jax.vjp(forward, x, *at)[1]([dy])
    return [dx, *(v for v, is_wanted in zip(sums, wanted, strict=True) if is_wanted)]


# --- The primitives.


def _type(x: Aval, *arrays: Aval, **_: object) -> list[Aval]:
    return [typed([x, *arrays], x, x.shape, x.dtype, x.ndim)]


def _types(
    dy: Aval, x: Aval, *arrays: Aval, layout: Layout, shape: Shape, wanted: Any, **_: object
) -> list[Aval]:
    weights = [(shape, arrays[0].dtype, len(shape) - layout.ndim)] * sum(wanted)
    return [*_type(x, dy), *(typed([x], x, *weight) for weight in weights)]


def _vectors(x: Shape, *, layout: Layout, shape: Shape = (), **_: object) -> list[Shape]:
    """Returns the shapes of moments, and of gradients of weights."""
    return [(*x[: len(x) - layout.ndim], *layout.moments_shape), *[shape] * bool(shape)]


def _vector_types(x: Aval, *mask: Aval, layout: Layout, centred: bool, **_: object) -> Any:
    (shape,), dtype = _vectors(x.shape, layout=layout), compute_dtype(x.dtype)
    return [typed([x, *mask], x, shape, dtype, x.ndim - layout.ndim)] * (3 if centred else 1)


def _lowered_tangent(target: Target, *arrays: Array, **static: Any) -> list[Array]:
    del target
    return _tangent(*arrays, **static)


_new = functools.partial(new_primitive, full=[0], vectors=_vectors)
RSTD_AND_MEAN = _new("rstd_and_mean", example_passes.rstd_and_mean, _vector_types)
NORM = _new("norm", choice_for_examples.y, _type)
D_NORM = new_primitive("d_norm", _lowered_tangent, _type, full=[0, 3])
D_NORM_T = _new("d_norm_t", choice_for_examples.gradients, _types, full=[0, 1])


# --- The derivatives.


def _norm_jvp(primals: Args, tangents: Args, *, kernel: bool, **static: Any) -> Args:
    x, *others = primals
    along = [*map(registry.instantiate_zeros, tangents[:3])]
    norm: RowNorm = static["norm"]
    how: Any = {"layout": static["layout"], "eps": norm.eps, "centred": norm.centred}
    vectors = [] if kernel else bind(RSTD_AND_MEAN, lax.stop_gradient(x), *others[2:], **how)
    operands = [*along, *primals[:3], *vectors, *primals[3:]]
    (y,) = NORM.bind(*primals, kernel=kernel, **static)
    return [y], bind(D_NORM, *operands, kernel=kernel, **static)


def _d_norm_transpose(cotangents: Args, *operands: Any, **static: Any) -> Args:
    linear, primals = operands[:3], operands[3:]
    if isinstance(cotangents[0], registry.Zero):
        return [None] * len(operands)
    wanted = [o.aval if registry.is_undefined_primal(o) else None for o in linear]
    shapes = [v.shape for v in (*wanted[1:], *primals[1:3]) if v is not None]
    of_weights = tuple(v is not None for v in wanted[1:])
    how: Any = {"shape": jnp.broadcast_shapes(*shapes) if any(of_weights) else ()}
    dx, *others = bind(D_NORM_T, *cotangents, *primals, wanted=of_weights, **how, **static)
    found = iter([dx, *others] if wanted[0] is not None else others)
    fit = [None if v is None else fitted(next(found), v) for v in wanted]
    return [*fit, *[None] * len(primals)]


def _jvp(passes: Callable[..., Any], primals: Args, tangents: Args, **static: Any) -> Args:
    # A mask, which is last, has no tangent.
    n = sum(jnp.issubdtype(p.dtype, jnp.inexact) for p in primals)
    at, along = tuple(primals[:n]), tuple(map(registry.instantiate_zeros, tangents[:n]))
    return jax.jvp(lambda *at: passes(*at, *primals[n:], **static), at, along)


_of_tangent, _of_gradients = (functools.partial(_jvp, f) for f in (_tangent, _gradients))
registry.derive(NORM, jvp=_norm_jvp)
registry.derive(D_NORM, jvp=_of_tangent, transpose=_d_norm_transpose)
registry.derive(D_NORM_T, jvp=_of_gradients)
