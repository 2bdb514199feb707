"""Computes the moments of an example's values, as differentiable functions of x."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact

from eqx_norm._jax import collectives
from eqx_norm._jax.collectives import AxisName
from eqx_norm.strategies import Moments, Pair
from eqx_norm.strategies._numbers import Floats

from . import complex_numbers
from .formulas import merge
from .formulas.layout import Example, Layout, full_count
from .moments_primitives import MOMENTS, STATISTICS
from .primitive import bind


def moments(
    example: Example,
    axis_name: AxisName = (),
    *,
    centred: bool = True,
    safe: bool = False,
    implementation: str = "auto",
) -> Moments:
    """Returns the moments of each group over the example and the named axes, computed as in
    `reference.statistics`. The moments have shape `(groups,)` and are float32 or better.
    Without a mask, the count is known at trace time.

    **Arguments:**

    - `axis_name`: the name, or a tuple of names, of axes that `vmap`, `shard_map` or `pmap`
        binds.
    - `centred`: if false, the mean is 0 and m2 is the sum of squares.
    - `safe`: as for `differentiable`.
    - `implementation`: as for the layers; see `kernels.availability`.
    """
    if jnp.iscomplexobj(example.x):
        of_parts = moments(
            complex_numbers.parts(example),
            axis_name,
            centred=centred,
            safe=safe,
            implementation=implementation,
        )
        return complex_numbers.joined(of_parts)
    vectors = _statistics(example, axis_name, centred, implementation)
    return differentiable(example, axis_name, *vectors, centred=centred, safe=safe)


def _statistics(
    example: Example, axis_name: AxisName, centred: bool, implementation: str
) -> Sequence[Inexact[Array, "..."]]:
    """Returns count, mean, m2 and mean_lo, of shape `layout.moments_shape`."""
    names, mesh = collectives.split_names(axis_name)
    x, layout = lax.stop_gradient(example.x), example.layout
    found = bind(
        STATISTICS,
        x,
        example.mask,
        layout=layout,
        shape=layout.moments_shape,
        names=names,
        centred=centred,
        implementation=implementation,
    )
    if centred:
        return merge.merged_over_mesh(found, mesh)
    count, m2 = collectives.summed(found, (), mesh)
    zero = jnp.zeros_like(m2)
    return [count, zero, m2, zero]


def differentiable_moments(example: Example, axis_name: AxisName, moments: Moments) -> Moments:
    """Returns constant moments of x as differentiable functions of x. The derivative of moments
    that are not finite is 0."""
    dtype, is_complex = moments.mean.dtype, jnp.iscomplexobj(example.x)
    moments = moments.astype(example.x_upcast.dtype)
    count, vectors = moments.known_count, [moments.mean, moments.m2, moments.mean_pair.rest]
    if example.mask is not None:
        count = jnp.expand_dims(count, 0)
    if is_complex:
        vectors = [*map(complex_numbers.concatenated_parts, vectors)]
        example = complex_numbers.parts(example)
    found = differentiable(example, axis_name, count, *vectors, centred=True, safe=True)
    if is_complex:
        found = complex_numbers.joined(found)
    return found.astype(dtype)


def differentiable(
    example: Example,
    axis_name: AxisName,
    count: Floats,
    mean: Inexact[Array, "..."],
    m2: Inexact[Array, "..."],
    mean_lo: Inexact[Array, "..."],
    *,
    centred: bool,
    safe: bool = False,
) -> Moments:
    """Returns moments, with one number for each group in any shape, as differentiable functions
    of x. Without a mask, or with one of whole positions, `full_count` replaces `count`. If
    `safe`, the derivative of moments that are not finite is 0."""
    x, x_upcast, mask, layout = example
    shape, ones = layout.moments_shape, (1,) * x.ndim
    if mask is None or _has_all_values_or_none(mask, layout, axis_name):
        size = full_count(example, axis_name)
        full = np.full if isinstance(size, int) else jnp.full
        count, n = full((), size, m2.dtype), full(ones, size, m2.dtype)
    elif layout.groups is None:
        count = jnp.ravel(count)
        n = jnp.maximum(count, 1).reshape(shape)
    else:  # all channels have the same count
        count = jnp.ravel(count)[0]
        n = jnp.maximum(count, 1).reshape(ones)
    names, mesh = collectives.split_names(axis_name)
    columns = [v.reshape(shape) for v in (mean, mean_lo, m2)]
    operands = [x_upcast, x, *columns, n]
    if mask is not None:
        operands.append(mask)
    found = MOMENTS.bind(
        *operands,
        layout=layout,
        shape=shape,
        names=names,
        mesh=mesh,
        centred=centred,
        safe=safe,
    )
    mean, m2, mean_lo = (v.reshape(-1) for v in (*found, mean_lo))
    return Moments(count, Pair.of(mean, mean_lo) if centred else mean, m2)


def _has_all_values_or_none(
    mask: Bool[Array, "..."], layout: Layout, axis_name: AxisName
) -> bool:
    """Returns whether the mask keeps each position's values all or not at all; false for groups
    and for named axes."""
    is_of_positions = all(mask.shape[axis] == 1 for axis in layout.axes)
    return layout.groups is None and axis_name == () and is_of_positions
