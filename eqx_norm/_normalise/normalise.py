"""Normalises an example's values by moments, and applies weight, bias and activation."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm.strategies import Moments

from .derivatives.activated import activated
from .derivatives.moments_and_affine import AFFINE
from .derivatives.new_primitive import bind
from .formulas import reference
from .formulas.activation import Activation, applied
from .formulas.layout import Blocks
from .values import Values


class Affine(NamedTuple):
    """Holds the map from standardised values u to y: `activation(weight * u + bias)`. A weight
    or bias has one number per channel or one per value."""

    weight: Array | None = None
    bias: Array | None = None
    activation: Activation | None = None


def normalise(values: Values, used: Moments, affine: Affine, *, eps: float) -> Array:
    r"""Returns $\text{activation}((x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} +
    \text{bias})$, with $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the dtype
    of `x`; 0 where the mask is false.

    All values up to the activation's result are float32 or better. `used` has one number per
    group.
    """
    (x, wide, mask, layout), blocks = values, values.layout.weight_blocks
    rstd = reference.rsqrt(used.variance + eps).astype(wide.dtype)
    mean, mean_rest, scale = columns = layout.columns(used, rstd)
    (weight, bias), activation = like_x(affine[:2], values), affine.activation
    if jnp.iscomplexobj(x):
        y = functools.partial(_in_jax_numpy, values, activation=activation)
        # A barrier before each vector, but not before x, which would then be saved twice.
        return jax.checkpoint(y, prevent_cse=(True,) * 3)(columns, weight, bias)
    function = None
    if any(w is not None and w.shape != scale.shape for w in (weight, bias)):
        function = functools.partial(_of_each_value, blocks, weight, bias, activation)
        weight = bias = None
    elif activation is not None:
        function = functools.partial(applied, activation)
    scale = scale if weight is None else scale * weight
    bias = jnp.zeros_like(scale) if bias is None else bias
    if function is None:
        (y,) = bind(AFFINE, bias, scale, wide, x, mean, mean_rest, mask, blocks=blocks)
    else:
        vectors = [bias, scale, mean, mean_rest]
        y = activated(function, blocks, vectors, wide, x, mask)
    if y.dtype == x.dtype:
        return y
    # The cast is on long rows, because XLA:CPU casts short rows slowly, for y and its gradient.
    return y.reshape(blocks.flat_outside(y.shape)).astype(x.dtype).reshape(y.shape)


def normalise_in_jax_numpy(
    values: Values, used: Moments, affine: Affine, *, eps: float
) -> Array:
    """Returns the result of `normalise`, computed by JAX's own operations, so that other tools
    can read the program."""
    rstd = reference.reciprocal_sqrt(used.variance + eps).astype(values.wide.dtype)
    columns = values.layout.columns(used, rstd)
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
    """Returns y by one formula; `columns` are mean, mean_rest and rstd."""
    (x, wide, mask, _), (mean, mean_rest, rstd) = values, columns
    # JAX's derivative of a selection is NaN where the unselected value is NaN.
    u = reference.centred(reference.masked(wide, mask), mean, mean_rest)
    u = u * (rstd if weight is None else rstd * weight)
    u = u if bias is None else u + bias
    y = applied(activation, u)
    return reference.masked(y, mask).astype(x.dtype)


def _of_each_value(
    blocks: Blocks,
    weight: Array | None,
    bias: Array | None,
    activation: Activation | None,
    u: Array,
) -> Array:
    """Returns `activation(weight * u + bias)`, for a weight or bias per value."""
    if weight is None:
        u = u if bias is None else u + bias
    else:
        # `AFFINE` is a primitive, so one pass sums the gradients of weight and bias.
        shift = jnp.zeros_like(weight) if bias is None else bias
        zero = jnp.zeros((1,) * u.ndim, u.dtype)
        (u,) = bind(AFFINE, shift, weight, u, u, zero, zero, blocks=blocks)
    return applied(activation, u)


def like_x(vectors: Sequence[Array | None], values: Values) -> list[Array | None]:
    """Returns each weight or bias with as many axes as x, in the compute dtype."""

    def reshaped(vector: Array) -> Array:
        shape = vector.shape if vector.ndim == values.x.ndim else values.layout.weights_shape
        shape = values.x.shape if vector.size == values.x.size else shape
        return vector.reshape(shape).astype(values.wide.dtype)

    return [None if vector is None else reshaped(vector) for vector in vectors]
