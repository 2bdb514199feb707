"""Computes the moments of an example's values, as differentiable functions of x."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_norm._jax import collectives
from eqx_norm._jax.collectives import AxisName
from eqx_norm.strategies import Moments, Pair

from . import complex_numbers
from .formulas import merge
from .formulas.layout import Values, full_count
from .moments_primitives import MOMENTS, STATISTICS
from .primitive import bind


def moments(
    values: Values,
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
    if jnp.iscomplexobj(values.x):
        of_parts = moments(
            complex_numbers.parts(values),
            axis_name,
            centred=centred,
            safe=safe,
            implementation=implementation,
        )
        return complex_numbers.joined(of_parts)
    vectors = _statistics(values, axis_name, centred, implementation)
    return differentiable(values, axis_name, *vectors, centred=centred, safe=safe)


def _statistics(
    values: Values, axis_name: AxisName, centred: bool, implementation: str
) -> Sequence[Array]:
    """Returns count, mean, m2 and mean_rest."""
    names, mesh = collectives.split_names(axis_name)
    x, layout = lax.stop_gradient(values.x), values.layout
    found = bind(
        STATISTICS,
        x,
        values.mask,
        layout=layout,
        shape=layout.moments_shape,
        names=names,
        centred=centred,
        implementation=implementation,
    )
    vectors = [v.reshape(-1) for v in found]
    if centred:
        return merge.merged_over_mesh(vectors, mesh)
    count, m2 = collectives.summed(vectors, (), mesh)
    zero = jnp.zeros_like(m2)
    return [count, zero, m2, zero]


def differentiable_moments(values: Values, axis_name: AxisName, moments: Moments) -> Moments:
    """Returns constant moments of x as differentiable functions of x. The derivative of moments
    that are not finite is 0."""
    dtype, is_complex = moments.mean.dtype, jnp.iscomplexobj(values.x)
    moments = moments.astype(values.x_upcast.dtype)
    vectors = moments.mean, moments.m2, moments.mean_pair.rest
    count = moments.count if values.mask is None else jnp.expand_dims(moments.count, 0)
    if is_complex:
        # Only the sum of the parts' m2 counts.
        pairs = ((v.real, v.imag if jnp.iscomplexobj(v) else 0 * v) for v in vectors)
        values, vectors = complex_numbers.parts(values), [*map(jnp.concatenate, pairs)]
    found = differentiable(values, axis_name, count, *vectors, centred=True, safe=True)
    return (complex_numbers.joined(found) if is_complex else found).astype(dtype)


def differentiable(
    values: Values,
    axis_name: AxisName,
    count: Any,
    mean: Array,
    m2: Array,
    rest: Array,
    *,
    centred: bool,
    safe: bool = False,
) -> Moments:
    """Returns moments, of shape `(groups,)`, as differentiable functions of x. Without a mask,
    `full_count` replaces `count`. If `safe`, the derivative of moments that are not finite is
    0."""
    (x, x_upcast, mask, layout), along_first = values, values.layout.groups is None
    # A mask of positions leaves all of a position's values or none, unless axes have names.
    is_of_positions = along_first and axis_name == ()
    is_of_positions &= mask is None or all(mask.shape[axis] == 1 for axis in layout.axes)
    if mask is None or is_of_positions:
        size = full_count(values, axis_name)
        full = np.full if isinstance(size, int) else jnp.full
        count, n = [full(s, size, m2.dtype) for s in ((), (1,) * x.ndim)]
    else:  # all channels have the same count
        count = count if along_first else count[0]
        n = jnp.maximum(count, 1).reshape(
            layout.moments_shape if along_first else (1,) * x.ndim
        )
    names, mesh = collectives.split_names(axis_name)
    columns = (v.reshape(layout.moments_shape) for v in (mean, rest, m2))
    arrays = (x_upcast, x, *columns, n, *([] if mask is None else [mask]))
    columns = MOMENTS.bind(
        *arrays,
        layout=layout,
        shape=layout.moments_shape,
        names=names,
        mesh=mesh,
        centred=centred,
        safe=safe,
    )
    mean, m2 = (column.reshape(-1) for column in columns)
    return Moments(count, Pair.of(mean, rest) if centred else mean, m2)
