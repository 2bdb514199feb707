"""Defines the one operation of all layers, `normalise`."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm._jax.collectives import AxisName
from eqx_norm.strategies import Moments
from eqx_norm.strategies._numbers import cast

from .formulas import reference
from .formulas.activation import Activation, applied, elementwise
from .formulas.layout import Values
from .formulas.reference import masked
from .formulas.row_norm import Options, RowNorm
from .kernels import rows
from .moments import moments
from .norm_primitives import NORM
from .primitive import bind


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
    (x, x_upcast, mask, layout), (weight, bias, activation) = values, affine
    is_complex = jnp.iscomplexobj(x)
    function = None
    if activation is not None and not is_complex:
        function = elementwise(activation, x.shape, x_upcast.dtype)
    is_kernel = implementation == "pallas"
    if is_kernel:
        rows.check(x, mask, layout, axis_name, activation, function)
    if used is None and (is_complex or axis_name != ()):
        used = moments(values, axis_name, centred=centred)
    if is_complex and used is not None:
        y = functools.partial(_in_jax_numpy, values, activation=activation)
        # A barrier before each vector, but not before x, which would then be saved twice.
        y = jax.checkpoint(y, prevent_cse=(True,) * 3)
        columns = _columns(used, eps, values, reference.rsqrt)
        return y(columns, *like_x((weight, bias), values))

    given = [] if used is None else [x_upcast, *_moments(used, values)]
    vectors = _weights(values, weight, bias, is_kernel)
    norm = RowNorm(eps, centred or used is not None, function)
    options = Options(norm, x.dtype, used is not None, is_kernel)
    in_pass = functools.partial(bind, NORM, x, layout=layout)
    if activation is None or function is not None:
        return in_pass(*vectors, *given, mask, options=options)[0]

    # A function that may not be elementwise is computed after the pass, and again for its
    # derivative, so that x is still the only residual of its size.
    def applied_after(vectors: list[Array], given: list[Array]) -> Array:
        (v,) = in_pass(*vectors, *given, mask, options=options._replace(dtype=x_upcast.dtype))
        return masked(applied(activation, v), mask).astype(x.dtype)

    return jax.checkpoint(applied_after)(vectors, given)


def _moments(used: Moments, values: Values) -> list[Array]:
    """Returns variance, mean and mean_rest of each group, with as many axes as x."""
    dtype, shape = values.x_upcast.dtype, values.layout.moments_shape
    vectors = used.variance.astype(dtype), *used.mean_pair.words(dtype)
    return [v.reshape(shape) for v in vectors]


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
            vectors.append(jnp.full((1,) * x.ndim, default, values.x_upcast.dtype))
        elif in_full:
            vectors.append(jnp.broadcast_to(vector, x.shape))
        else:
            vectors.append(layout.weights(vector))
    return vectors


def like_x(vectors: Sequence[Array | None], values: Values) -> list[Array | None]:
    """Returns weight and bias with as many axes as x, in the compute dtype; raises `TypeError`
    for complex ones if x is real."""

    def reshaped(name: str, vector: Array) -> Array:
        shape = vector.shape if vector.ndim == values.x.ndim else values.layout.weights_shape
        shape = values.x.shape if vector.size == values.x.size else shape
        return cast(name, vector.reshape(shape), values.x_upcast.dtype)

    named = zip(("weight", "bias"), vectors, strict=True)
    return [None if vector is None else reshaped(name, vector) for name, vector in named]


def normalise_in_jax_numpy(
    values: Values, used: Moments, affine: Affine, *, eps: float
) -> Array:
    """Returns the result of `normalise`, computed by JAX's own operations, so that other tools
    can read the program."""
    columns = _columns(used, eps, values, reference.reciprocal_sqrt)
    weight, bias = like_x(affine[:2], values)
    return _in_jax_numpy(values, columns, weight, bias, activation=affine.activation)


def _columns(
    used: Moments, eps: float, values: Values, rsqrt: Callable[[Array], Array]
) -> list[Array]:
    """Returns rstd, mean and mean_rest of each channel, with as many axes as x."""
    variance, *mean = _moments(used, values)
    return [*map(values.layout.spread, (rsqrt(variance + eps), *mean))]


def _in_jax_numpy(
    values: Values,
    columns: list[Array],
    weight: Array | None,
    bias: Array | None,
    *,
    activation: Activation | None,
) -> Array:
    """Returns y by one formula; `columns` are rstd, mean and mean_rest."""
    (x, x_upcast, mask, _), (rstd, mean, mean_rest) = values, columns
    # JAX's derivative of a selection is NaN where the unselected value is NaN.
    u = reference.centred(masked(x_upcast, mask), mean, mean_rest)
    u = u * (rstd if weight is None else rstd * weight)
    u = u if bias is None else u + bias
    y = applied(activation, u)
    return masked(y, mask).astype(x.dtype)
