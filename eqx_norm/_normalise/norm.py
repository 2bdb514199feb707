"""Defines the one operation of all layers, `normalise`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from eqx_norm._jax.collectives import AxisName
from eqx_norm.strategies import Moments
from eqx_norm.strategies._numbers import cast

from .formulas import reference
from .formulas.activation import Activation, applied, elementwise
from .formulas.layout import Example
from .formulas.reference import masked
from .formulas.row_norm import Options, RowNorm
from .kernels import rows
from .moments import moments
from .norm_primitives import NORM
from .primitive import bind


class Affine(NamedTuple):
    """Holds the map from standardised values u to y: `activation(weight * u + bias)`. A weight
    or bias has one number per channel or one per value."""

    weight: Inexact[Array, "..."] | None = None
    bias: Inexact[Array, "..."] | None = None
    activation: Activation | None = None


def normalise(
    example: Example,
    affine: Affine,
    used: Moments | None = None,
    axis_name: AxisName = (),
    *,
    eps: float,
    centred: bool = True,
    implementation: str = "auto",
) -> Inexact[Array, "*example"]:
    r"""Returns $\text{activation}((x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} +
    \text{bias})$, with $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the dtype
    of `x`; 0 where the mask is false.

    **Arguments:**

    - `used`: moments with one number per group; by default those of the example itself, over
        all its parts along `axis_name`.
    - `centred`: if false, the example's mean counts as 0.
    """
    x, x_upcast, mask, layout = example
    weight, bias, activation = affine
    is_complex = jnp.iscomplexobj(x)
    function = None
    if activation is not None and not is_complex:
        function = elementwise(activation, x.shape, x_upcast.dtype)
    is_kernel = implementation == "pallas"
    if is_kernel:
        rows.check(x, mask, layout, axis_name, activation, function)
    if used is None and (is_complex or axis_name != ()):
        used = moments(example, axis_name, centred=centred)
    if is_complex and used is not None:
        y = functools.partial(_in_jax_numpy, example, activation=activation)
        # A barrier before each vector, but not before x, which would then be saved twice.
        y = jax.checkpoint(y, prevent_cse=(True, True, True))
        columns = _columns(used, eps, example, reference.rsqrt)
        return y(columns, *_like_x(example, weight, bias))

    given = [] if used is None else [x_upcast, *_moments(used, example)]
    vectors = _weights(example, weight, bias, is_kernel)
    norm = RowNorm(eps, centred or used is not None, function)
    options = Options(norm, x.dtype, given=used is not None, kernel=is_kernel)
    if activation is None or function is not None:
        return bind(NORM, x, *vectors, *given, mask, layout=layout, options=options)[0]
    options = options._replace(dtype=x_upcast.dtype)

    # A function that may not be elementwise is computed after the pass, and again for its
    # derivative, so that x is still the only residual of its size.
    def applied_after(vectors: list[Array], given: list[Array]) -> Float[Array, "*example"]:
        (v,) = bind(NORM, x, *vectors, *given, mask, layout=layout, options=options)
        return masked(applied(activation, v), mask).astype(x.dtype)

    return jax.checkpoint(applied_after)(vectors, given)


def _moments(used: Moments, example: Example) -> list[Inexact[Array, "..."]]:
    """Returns variance, mean and mean_lo of each group, with as many axes as x."""
    dtype, shape = example.x_upcast.dtype, example.layout.moments_shape
    vectors = used.variance.astype(dtype), *used.mean_pair.words(dtype)
    return [v.reshape(shape) for v in vectors]


def _weights(
    example: Example,
    weight: Inexact[Array, "..."] | None,
    bias: Inexact[Array, "..."] | None,
    is_kernel: bool,
) -> list[Float[Array, "..."]]:
    """Returns weight and bias with as many axes as x; a missing one is a scalar 1 or 0. If one
    has a number for each value, the other, if given, is broadcast to x."""
    x, layout = example.x, example.layout
    weight, bias = _like_x(example, weight, bias)
    # A kernel takes a weight of each value, or one of each group.
    in_full = is_kernel and (layout.groups == 1 or layout.channels != layout.groups)
    for vector in (weight, bias):
        if vector is not None and x.ndim > 0 and vector.shape == x.shape:
            in_full = True

    def vector_or(default: int, vector: Inexact[Array, "*#x"] | None) -> Inexact[Array, "..."]:
        if vector is None:
            return jnp.full((1,) * x.ndim, default, example.x_upcast.dtype)
        if in_full:
            return jnp.broadcast_to(vector, x.shape)
        return layout.weights(vector)

    return [vector_or(1, weight), vector_or(0, bias)]


def _like_x(
    example: Example,
    weight: Inexact[Array, "..."] | None,
    bias: Inexact[Array, "..."] | None,
) -> tuple[Inexact[Array, "..."] | None, Inexact[Array, "..."] | None]:
    """Returns weight and bias with as many axes as x, in the compute dtype; raises `TypeError`
    for complex ones if x is real."""
    if weight is not None:
        weight = cast("weight", _with_axes_of_x(example, weight), example.x_upcast.dtype)
    if bias is not None:
        bias = cast("bias", _with_axes_of_x(example, bias), example.x_upcast.dtype)
    return weight, bias


def _with_axes_of_x(example: Example, vector: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    if vector.size == example.x.size:
        return vector.reshape(example.x.shape)
    if vector.ndim == example.x.ndim:
        return vector
    return vector.reshape(example.layout.weights_shape)


def normalise_in_jax_numpy(
    example: Example, used: Moments, affine: Affine, *, eps: float
) -> Inexact[Array, "*example"]:
    """Returns the result of `normalise`, computed by JAX's own operations, so that other tools
    can read the program."""
    columns = _columns(used, eps, example, reference.reciprocal_sqrt)
    weight, bias = _like_x(example, affine.weight, affine.bias)
    return _in_jax_numpy(example, columns, weight, bias, activation=affine.activation)


def _columns(
    used: Moments, eps: float, example: Example, rsqrt: Callable[[Array], Array]
) -> list[Inexact[Array, "..."]]:
    """Returns rstd, mean and mean_lo of each channel, with as many axes as x."""
    variance, *mean = _moments(used, example)
    return [*map(example.layout.spread, (rsqrt(variance + eps), *mean))]


def _in_jax_numpy(
    example: Example,
    columns: list[Inexact[Array, "*#example"]],
    weight: Inexact[Array, "*#example"] | None,
    bias: Inexact[Array, "*#example"] | None,
    *,
    activation: Activation | None,
) -> Inexact[Array, "*example"]:
    """Returns y by one formula; `columns` are rstd, mean and mean_lo."""
    x, x_upcast, mask, _ = example
    rstd, mean, mean_lo = columns
    # JAX's derivative of a selection is NaN where the unselected value is NaN.
    u = reference.centred(masked(x_upcast, mask), mean, mean_lo)
    scale = rstd if weight is None else rstd * weight
    y = u * scale
    if bias is not None:
        y = y + bias
    return masked(applied(activation, y), mask).astype(x.dtype)
