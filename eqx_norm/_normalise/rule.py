"""The one differentiable operation, in two halves between which a strategy stands.

`moments` and `normalise` work on one example, `(channels, values)`, under a `vmap` that binds
the axis name. The derivative of both is that of `primitives.sums` and `primitives.affine`:

- moments: d mean = sum(dx) / n and d m2 = 2 sum(dx (x - mean)): one `sums`. Moments are
  polynomials of degree 2, so around a mean that does not move, D = sum(x - mean) and
  Q = sum((x - mean)^2), the mean is mean + D/n and m2 is Q - D^2/n, to all orders.
- normalise: u = affine(bias, scale; x, mean) and y = activation(u), so
  du = scale dx + affine(dbias - scale dmean, dscale; x, mean): one `affine`.

Transposed, the backward pass of both is two sums in one pass over x and dy, then vectors, then
one pass for dx. What lies between, a strategy and the square root, is ordinary JAX on vectors,
and differentiated as such: any strategy costs what the plainest does.

For the backward pass x is kept, in its own dtype, and vectors. The slope of the activation is
computed again (`primitives.slope`; for one that has arrays of its own, `_applied`).
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm.strategies import Moments

from . import derivatives, elementwise, invariant, primitives, reference
from .reference import Activation

AxisName = Hashable | tuple[Hashable, ...]
Example = Float[Array, " channels values"]
Vector = Float[Array, " channels"]
Mask = Bool[Array, "1 values"] | None


def moments(
    x: Example,
    wide: Example,
    mask: Mask,
    axis_name: AxisName,
    implementation: Any,
    given: Sequence[Vector] | None = None,
) -> tuple[Vector, Vector, Vector, Vector]:
    """Count, mean, rest and m2 of each channel, over its values and the named axes.

    `wide` is x in the precision to calculate in. See `normalise`. `given` are the four, where
    they are known and their derivatives are not.
    """
    if given is None:
        given = _gathered(lax.stop_gradient(x), mask, axis_name, implementation)
    count, mean, rest, m2 = given
    # Both are 0, and so is what they add below; their derivatives are not.
    zeros = _deviations(implementation, wide, x, mask, mean, rest)
    sum_d, sum_d2 = lax.psum(zeros, axis_name)
    n = jnp.maximum(count, 1)
    return count, mean + sum_d / n, rest, m2 + (sum_d2 - sum_d * sum_d / n)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _deviations(
    implementation: Any, wide: Example, x: Example, mask: Mask, mean: Vector, rest: Vector
) -> tuple[Vector, Vector]:
    """What sum(x - mean) and sum((x - mean)^2) change by when x does and the mean does not.

    The value is 0, the derivative sum(dx) and 2 sum(dx (x - mean)).
    """
    del implementation, x, mask, mean, rest
    # Selected, so that it is mapped where x is: the derivative will be, and where a custom_jvp
    # is differentiated after it was mapped, jax 0.10.2 takes the value's word for both.
    zero = jnp.where(False, wide[:, 0], 0)
    return zero, zero


@_deviations.defjvp
def _(implementation: Any, primals: Any, tangents: Any) -> Any:
    _, x, mask, mean, rest = primals
    columns = mean[:, None], rest[:, None]
    sum_dx, sum_dx_d = primitives.sums(
        tangents[0], x, *columns, mask, columns[0].shape, implementation=implementation
    )
    return _deviations(implementation, *primals), (sum_dx[:, 0], 2 * sum_dx_d[:, 0])


def _gathered(
    x: Example, mask: Mask, axis_name: AxisName, implementation: Any
) -> tuple[Vector, Vector, Vector, Vector]:
    if isinstance(implementation, invariant.Across):
        return _gathered_examples(x, mask, axis_name, implementation)
    mesh = jax.sharding.get_abstract_mesh().manual_axes
    # Gathered over a mapped axis, an array is just not mapped any more: nothing is moved.
    x, mask = x[None], None if mask is None else mask[None]
    for name in _names(axis_name):
        if name not in mesh:
            x = _gather(x, name, tiled=True)
            mask = None if mask is None else _gather(mask, name, tiled=True)
    count, mean, rest, m2 = primitives.statistics(x, mask, implementation=implementation)
    # Of other devices only the vectors are fetched, at once, and merged in their order.
    for name in _names(axis_name):
        if name in mesh:
            shards = _gather(jnp.stack([count, mean, m2, rest]), name)
            merged = functools.reduce(Moments.merge, itertools.starmap(Moments, shards))
            count, mean, m2, rest = merged.count, merged.mean, merged.m2, merged.mean_rest
    return count, mean, rest, m2


def _gathered_examples(
    x: Example, mask: Mask, axis_name: AxisName, across: invariant.Across
) -> tuple[Vector, Vector, Vector, Vector]:
    """The same, merged of the moments of each example."""
    one = x[None], None if mask is None else mask[None]
    vectors = [v[None] for v in primitives.statistics(*one, implementation=across)]
    for name in _names(axis_name):
        if name not in across.mesh_axes:
            vectors = [_gather(vector, name, tiled=True) for vector in vectors]
    count, mean, rest, m2 = vectors
    merged = invariant.merged(Moments(count[:, :1], mean, m2, rest), across, _gather)
    return jnp.broadcast_to(merged.count, x.shape[:1]), merged.mean, merged.mean_rest, merged.m2


def normalise(
    x: Example,
    wide: Example,
    mean: Vector,
    rest: Vector,
    scale: Vector,
    bias: Vector,
    mask: Mask,
    activation: Activation | None,
    implementation: Any,
) -> Example:
    """`activation(bias + scale * (x - mean))` in the dtype of `x`; 0 where `mask` is false.

    `wide` is x in the vectors' dtype, and what is differentiated instead of x: the cotangents
    that x gets from here and from its moments are added before they are rounded to half
    precision. Its value is not used. The activation has no arrays of its own.
    """
    how = _How(activation, x.dtype, implementation)
    return _activated(how, wide, *_operands(x, mean, rest, scale, bias, mask))


def normalise_and(
    function: Activation,
    shape: tuple[int, ...],
    x: Example,
    wide: Example,
    mean: Vector,
    rest: Vector,
    scale: Vector,
    bias: Vector,
    mask: Mask,
) -> Example:
    """Returns `function(normalised x)`, for any function of an example's values that keeps
    their shape, with arrays that are differentiated for example; in the vectors' dtype.

    `shape` is that of the example before it was made flat, and what the function is given.
    """
    operands = _operands(x, mean, rest, scale, bias, mask)
    # XLA's, which can fuse the function's slope into the sums of the backward pass.
    u = _activated(_How(None, wide.dtype, "xla"), wide, *operands)

    def of_example(u: Array) -> Array:
        return reference.applied(function, u.reshape(shape)).reshape(u.shape)

    if elementwise.has_forward_derivative(of_example, u.shape, u.dtype):
        pure, arrays = jax.closure_convert(of_example, u)
        y = _applied(pure, arrays, u, *operands)
    else:  # then u is kept, as if the function came after the layer
        y = of_example(u)
    return reference.counted(y, mask)


def _operands(
    x: Example, mean: Vector, rest: Vector, scale: Vector, bias: Vector, mask: Mask
) -> tuple[Any, ...]:
    mean, rest, scale, bias = (vector[:, None] for vector in (mean, rest, scale, bias))
    return bias, scale, x, mean, rest, mask


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _applied(function: Any, arrays: list[Array], u: Array, *operands: Any) -> Array:
    """`function(u, *arrays)`. For its derivative u is not kept, but computed again of x."""
    del operands
    return function(u, *arrays)


@_applied.defjvp
def _(function: Any, primals: Any, tangents: Any) -> Any:
    (arrays, _, *operands), (d_arrays, du, *_) = primals, tangents

    def slope(arrays: Any, operands: Any, d_arrays: Any, du: Any) -> Array:
        bias, scale, x, mean, rest, mask = operands
        bias, scale, mean, rest = primitives.again(bias, scale, mean, rest)
        u = primitives.affine(bias, scale, x, mean, rest, mask)
        return jax.jvp(function, (u, *arrays), (du, *d_arrays))[1]

    # What XLA must not share with the forward pass, `again` has seen to.
    tangent = jax.checkpoint(slope, prevent_cse=False)(arrays, operands, d_arrays, du)
    return _applied(function, *primals), tangent


class _How(NamedTuple):
    """What is no array."""

    activation: Activation | None
    dtype: jnp.dtype  # of the result
    implementation: Any


def _activated(how: _How, wide: Array, *operands: Any) -> Array:
    if wide.dtype != operands[2].dtype:
        return _through_wide(how, wide, *operands)
    return primitives.activated(
        how.activation, how.dtype, *operands, implementation=how.implementation
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _through_wide(how: _How, wide: Array, *operands: Any) -> Array:
    return _activated(how, operands[2], *operands)


@_through_wide.defjvp
def _(how: _How, primals: Any, tangents: Any) -> Any:
    (_, *operands), (d_wide, da, db, _, *rest) = primals, tangents
    present = [operand for operand in operands if operand is not None]
    tangent = derivatives.tangent(
        how.activation,
        how.dtype,
        present,
        (da, db, d_wide, *rest),
        implementation=how.implementation,
    )
    return _through_wide(how, *primals), tangent


def _names(axis_name: AxisName) -> tuple[Hashable, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _gather(array: Array, name: Hashable, *, tiled: bool = False) -> Array:
    # One name at a time: all_gather takes no tuple of vmapped names.
    try:
        return lax.all_gather(array, name, tiled=tiled)
    except (AssertionError, ValueError) as error:
        # Seen with jax 0.10.2 and 0.12.0.1, where any collective over a vmapped axis fails.
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"JAX refuses collectives over the vmapped axis {name!r} inside a shard_map "
                "that checks varying manual axes. Write "
                "jax.shard_map(..., check_vma=False) around this layer."
            ) from error
        raise
