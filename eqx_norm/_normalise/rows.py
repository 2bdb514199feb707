"""Normalises a row by its own moments, as one operation: what LayerNorm is.

    rows(x, weight, bias)          y, and mean, m2, mean_rest
    rows_jvp(x', w', b'; ...)      the tangent of y               linear in x', w' and b'
    rows_vjp(g; ...)               the cotangents of x, w and b   linear in g

They compute what `Values` computes, and their derivatives are derived from its: `rows_jvp` and
`rows_vjp` are each other's transpose, and all higher orders remain. As one operation, a kernel
can hold a row in its registers and read it once each way, where two passes read it twice.

Flattened, arrays are `(*mapped, 1, values)`; of weight and bias, the mapped axes have size 1
where they are shared.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact

from eqx_norm.strategies import Moments

from . import elementwise
from .arithmetic import Arithmetic, Implementation
from .gpu import choice
from .primitives import Compute, Shape, Shapes, Static, bind, flattened, like, new_primitive
from .reference import Activation, compute_dtype
from .values import Values


class Row(NamedTuple):
    """Holds how a row is normalised."""

    eps: float
    activation: Activation | None  # without arrays of its own
    implementation: Implementation


def normalise_row(
    x: Inexact[Array, "*shape"],
    weight: Inexact[Array, "*shape"] | None,
    bias: Inexact[Array, "*shape"] | None,
    *,
    eps: float,
    activation: Activation | None = None,
    implementation: Implementation = "auto",
) -> Inexact[Array, "*shape"]:
    """Returns `Values.normalise` by the moments of the same x, all of it one channel."""
    dtype = compute_dtype(x.dtype)
    function = elementwise.function(activation)
    is_pure = function is None or elementwise.is_pure(function, x.shape, dtype)
    if jnp.iscomplexobj(x) or not is_pure or implementation == "plain":
        values = Values(x, implementation=implementation, has_channels=False)
        used = values.moments()
        return values.normalise(used, weight, bias, eps=eps, activation=activation)
    affine = []
    if weight is not None or bias is not None:
        affine = [
            jnp.ones(x.shape, dtype) if weight is None else weight.astype(dtype),
            jnp.zeros(x.shape, dtype) if bias is None else bias.astype(dtype),
        ]
    row = Row(eps, function, implementation)
    static = Static(x.ndim, Arithmetic(implementation), has_channels=False, row=row)
    return bind(ROWS, x, *affine, static=static)[0]


# --- What they compute, of flattened arrays.


def _one(row: Row, given: Sequence[Array] | None, x: Array, *affine: Array) -> list[Array]:
    """Returns y and the moments of one row, `(1, values)`; `given` are those, if known."""
    values = Values(x[0], implementation=row.implementation, has_channels=False)
    if given is None:
        used = values.moments()
    else:
        mean, m2, mean_rest = (vector[0] for vector in given)
        used = values.differentiable(
            Moments(np.asarray(x.size, mean.dtype), mean, m2, mean_rest)
        )
    vectors = (array[0] for array in affine)
    y = values.normalise(used, *vectors, eps=row.eps, activation=row.activation)
    return [y[None], used.mean[None], used.m2[None], used.mean_rest[None]]


def _rows(*arrays: Array, row: Row) -> list[Array]:
    return _each(functools.partial(_one, row, None), *arrays)


def _rows_jvp(*arrays: Array, row: Row, learns: bool) -> list[Array]:
    """Returns the tangent of y, of those of x and, if it `learns`, of weight and bias; then
    come what `rows` took and what it gave."""
    linear = 3 if learns else 1

    def tangent(*arrays: Array) -> Array:
        tangents, inner, given = arrays[:linear], arrays[linear:-3], arrays[-3:]
        moving, fixed = inner[:linear], inner[linear:]

        def y(*moving: Array) -> Array:
            return _one(row, lax.stop_gradient(given), *moving, *fixed)[0]

        return jax.jvp(y, moving, tangents)[1]

    return [_each(tangent, *arrays)]


def _rows_vjp(
    g: Array, *inner: Array, row: Row, learns: bool, shape: Shape | None
) -> list[Array]:
    # These have the type of the way forward, mesh axes included: transposed, a tangent that
    # starts to vary over devices is summed over them.
    linear = [like(g, g.shape, g.dtype)]
    if shape is not None:
        linear += [like(g, shape, array.dtype) for array in inner[1:3]]

    def jvp(*tangents: Array) -> list[Array]:
        return _rows_jvp(*tangents, *inner, row=row, learns=learns)

    return list(jax.linear_transpose(jvp, *linear)([g]))


def _each(f: Callable[..., Any], *arrays: Array) -> Any:
    """Returns `f` of each row; what has no row of its own is shared."""
    if all(array.ndim == 2 for array in arrays):
        return f(*arrays)
    size = max(array.shape[0] for array in arrays)
    axes = tuple(0 if array.shape[0] == size else None for array in arrays)
    arrays = tuple(a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True))
    return jax.vmap(functools.partial(_each, f), in_axes=axes)(*arrays)


def _rows_shapes(x: Any, *_: Any, static: Static) -> list[tuple[Shape, Any]]:
    vector = (*x.shape[: x.ndim - static.spatial], *(1,) * static.spatial)
    return [(x.shape, x.dtype), *[(vector, compute_dtype(x.dtype))] * 3]


def _jvp_shapes(dx: Any, *_: Any, static: Static, learns: bool) -> list[tuple[Shape, Any]]:
    return [(dx.shape, dx.dtype)]


def _vjp_shapes(
    g: Any, *inner: Any, static: Static, learns: bool, shape: Shape | None
) -> list[tuple[Shape, Any]]:
    affine = [] if shape is None else [(shape, inner[1].dtype)] * 2
    return [(g.shape, g.dtype), *affine]


ROWS = new_primitive(
    "rows",
    _rows,
    _rows_shapes,
    full=[0],
    takes=["row"],
    kernel=choice.of_rows,
)
ROWS_JVP = new_primitive("rows_jvp", _rows_jvp, _jvp_shapes, full=[0], takes=["row"])
ROWS_VJP = new_primitive(
    "rows_vjp", _rows_vjp, _vjp_shapes, full=[0], takes=["row"], kernel=choice.of_rows_vjp
)


def _composed(compute: Compute, shapes: Shapes) -> Compute:
    """Returns what a primitive computes for arrays as they are, to be differentiated."""

    def call(*arrays: Array, **parameters: Any) -> Any:
        results = [shape for shape, _ in shapes(*arrays, **parameters)]
        return flattened(compute, ["row"], results)(*arrays, **parameters)

    return call


composed_jvp = _composed(_rows_jvp, _jvp_shapes)
composed_vjp = _composed(_rows_vjp, _vjp_shapes)
