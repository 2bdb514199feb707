"""Normalises one example by its own moments: by the passes, or on a GPU by one kernel."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import elementwise, on_cpu, one_kernel
from .collectives import AxisName
from .moments import differentiable, moments
from .normalise import Affine, normalise, normalise_in_jax_numpy
from .one_kernel import Chain
from .row_norm import RowNorm
from .values import Values


def normalise_example(
    values: Values, affine: Affine, axis_name: AxisName = (), *, eps: float, centred: bool
) -> Array:
    """Returns the example, normalised by its moments over all its parts along `axis_name`. A
    GPU and a CPU have a faster form for a y that is not differentiated."""
    used = moments(values, axis_name, centred=centred)
    y = normalise(values, used, affine, eps=eps)
    chain = None if axis_name != () else _chain(values, affine, RowNorm(eps, centred))
    if chain is None:
        return y
    layout, activation = values.layout, affine.activation
    of_layout = functools.partial(Values.of, groups=layout.groups, channels=layout.channels)

    def by_passes(x: Array, weight: Array | None, bias: Array | None, vectors: Any) -> Array:
        values = of_layout(x)
        used = differentiable(values, (), None, *vectors, centred=centred)
        return normalise(values, used, Affine(weight, bias, activation), eps=eps)

    def undifferentiated(x: Array, weight: Array | None, bias: Array | None) -> Array:
        rows, length = layout.of_weights.flat_outside(x.shape), x.size // layout.size
        values = of_layout(x.reshape(rows))
        if centred or length > on_cpu.UNCUT:
            used = moments(values, centred=centred, differentiated=False)
        else:
            m2 = on_cpu.squares(x, layout.size)
            used = Moments(jnp.full((), length, m2.dtype), jnp.zeros_like(m2), m2)

        def in_shape_of_x(u: Array) -> Array:
            return elementwise.applied(activation, u.reshape(x.shape)).reshape(rows)

        function = elementwise.in_shape(activation, x.shape, rows)
        function = function if activation is None else function or in_shape_of_x
        in_rows = Affine(weight, bias, function)
        y = normalise_in_jax_numpy(values, used, in_rows, eps=eps, centred=centred)
        return y.reshape(x.shape)

    vectors = used.mean, used.m2, used.mean_pair.rest
    arrays = y, values.x, affine[:2], vectors
    return one_kernel.dispatched(chain, by_passes, undifferentiated, *arrays)


def _chain(values: Values, affine: Affine, norm: RowNorm) -> Chain | None:
    """Returns the norm as a `Chain`, or `None` if `one_kernel` cannot compute the norm."""
    (x, wide, mask, layout), activation = values, affine.activation
    is_known = x.ndim > 0 and all(isinstance(n, int) for n in x.shape)
    has_rows = mask is None and layout.groups is not None
    if not (has_rows and wide.dtype == jnp.float32 and is_known and x.size):
        return None
    repeats = 0 if layout.channels in (1, layout.size) else x.size // layout.channels
    chain = Chain(x.shape, layout.size, repeats, norm)
    function = elementwise.in_shape(activation, x.shape, chain.rows)
    if activation is not None and function is None:
        return None
    return chain._replace(norm=norm._replace(activation=function))
