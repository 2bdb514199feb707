"""A row normalised by its own moments, as one operation: what LayerNorm is.

    rows(x, weight, bias)          y, and mean, rest, m2       (see `_one`)
    pushed_rows(x', w', b'; ...)   the tangent of y            linear in x', w' and b'
    pulled_rows(g; ...)            of x, w and b               linear in g

They compute what the two halves in `rule` compute, one after the other, and their derivatives
are derived from those: each is the other's transpose, and of higher orders. Nothing stands
between the halves but a square root; so, as one, a kernel can hold a row in its registers and
read it once each way, where two passes read it twice.

Arrays are `(*mapped, 1, values)`; of weight and bias, the mapped axes have size 1 where they
are shared.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import elementwise, reference, rule
from .derivatives import all_zero, dense
from .gpu import choice as kernels
from .new_primitive import bind, like, new_primitive
from .reference import Activation, compute_dtype


class How(NamedTuple):
    """What is no array."""

    eps: float
    activation: Activation | None  # without arrays of its own
    implementation: str


def normalise_row(x: Array, weight: Array | None, bias: Array | None, how: How) -> Array:
    """`activation(bias + weight * (x - mean) / sqrt(variance + eps))`, in the dtype of `x`.

    Over one row: all arrays are `(1, values)`, weight and bias in float32 or better.
    """
    affine = []
    if weight is not None or bias is not None:
        dtype = compute_dtype(x.dtype)
        affine = [
            jnp.ones(x.shape, dtype) if weight is None else weight,
            jnp.zeros(x.shape, dtype) if bias is None else bias,
        ]
    return bind(ROWS, x, *affine, how=how, implementation=how.implementation)[0]


# --- What they compute.


def _one(how: How, given: Sequence[Array] | None, x: Array, *affine: Array) -> list[Array]:
    """One row; `given` are its mean, rest and m2, if they are known."""
    wide = x.astype(compute_dtype(x.dtype))
    if given is not None:
        given = [jnp.full((1,), x.size, wide.dtype), *(vector[0] for vector in given)]
    count, mean, rest, m2 = rule.moments(x, wide, None, (), how.implementation, given)
    rstd = reference.rsqrt(Moments(count, mean, m2, rest).variance + how.eps)
    operands = (x, wide, mean, rest, rstd, jnp.zeros_like(rstd), None)
    if affine:
        weight, bias = affine
        function = elementwise.Affine(weight, bias, how.activation)
        y = rule.normalise_and(function, x.shape, *operands)
    else:
        y = rule.normalise(*operands, how.activation, how.implementation)
    return [y.astype(x.dtype), mean[None], rest[None], m2[None]]


def _rows_of(x: Array, *affine: Array, how: How) -> list[Array]:
    return _each(functools.partial(_one, how, None), x, *affine)


def _pushed_of(*arrays: Array, how: How, learns: bool) -> list[Array]:
    """Tangents of x and, if it `learns`, of weight and bias; then what `rows` took and gave."""
    linear = 3 if learns else 1

    def one(*arrays: Array) -> Array:
        tangents, inner, given = arrays[:linear], arrays[linear:-3], arrays[-3:]
        moving, fixed = inner[:linear], inner[linear:]

        def y(*moving: Array) -> Array:
            return _one(how, lax.stop_gradient(given), *moving, *fixed)[0]

        return jax.jvp(y, moving, tangents)[1]

    return [_each(one, *arrays)]


def _pulled_of(
    g: Array, *inner: Array, how: How, learns: bool, shape: tuple[int, ...]
) -> list[Array]:
    # Of the type that they have on the way forward, mesh axes included: transposed, a tangent
    # that starts to vary over devices is summed over them.
    linear = [like(g, g.shape, g.dtype)]
    if learns:
        linear += [like(g, shape, array.dtype) for array in inner[1:3]]

    def pushed(*tangents: Array) -> list[Array]:
        return _pushed_of(*tangents, *inner, how=how, learns=learns)

    return list(jax.linear_transpose(pushed, *linear)([g]))


def _each(f: Callable[..., Any], *arrays: Array) -> Any:
    """`f` of each row; what has no row of its own is shared."""
    if all(array.ndim == 2 for array in arrays):
        return f(*arrays)
    size = max(array.shape[0] for array in arrays)
    axes = tuple(0 if array.shape[0] == size else None for array in arrays)
    arrays = tuple(a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True))
    return jax.vmap(functools.partial(_each, f), in_axes=axes)(*arrays)


def _vector(x: Any) -> tuple[tuple[int, ...], Any]:
    return (*x.shape[:-1], 1), compute_dtype(x.dtype)


ROWS = new_primitive(
    "rows",
    _rows_of,
    _rows_of,
    lambda x, *_, how: [(x.shape, x.dtype), *[_vector(x)] * 3],
    full=[0],
    kernel=kernels.of_rows,
)
PUSHED_ROWS = new_primitive(
    "pushed_rows",
    _pushed_of,
    _pushed_of,
    lambda dx, *_, how, learns: [(dx.shape, dx.dtype)],
    full=[0],
)
PULLED_ROWS = new_primitive(
    "pulled_rows",
    _pulled_of,
    _pulled_of,
    lambda g, *inner, how, learns, shape: [
        (g.shape, g.dtype),
        *[(shape, inner[1].dtype)] * (2 * learns),
    ],
    full=[0],
    kernel=kernels.of_pulled_rows,
)


# --- Their derivatives.


def _rows_jvp(primals: Any, tangents: Any, *, how: How, **parameters: Any) -> Any:
    results = bind(ROWS, *primals, how=how, **parameters)
    learns = not all_zero(*tangents[1:])
    linear = len(primals) if learns else 1
    moving = map(dense, tangents[:linear], primals)
    (dy,) = bind(PUSHED_ROWS, *moving, *primals, *results[1:], how=how, learns=learns)
    # What the others change by, `_one` has seen to.
    return results, [dy, *map(jnp.zeros_like, results[1:])]


def _composed_jvp(
    primitive: Primitive,
    compute: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    implementation: str = "auto",
    **parameters: Any,
) -> Any:
    del implementation  # of what it is composed of, `how` says it
    moving = [i for i, tangent in enumerate(tangents) if not all_zero(tangent)]

    def f(moved: list[Array]) -> Any:
        arrays = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return compute(*arrays.values(), **parameters)

    at, along = ([values[i] for i in moving] for values in (primals, tangents))
    return primitive.bind(*primals, **parameters), jax.jvp(f, (at,), (along,))[1]


def _pushed_transpose(cotangents: Any, *arrays: Any, how: How, learns: bool) -> Any:
    linear = 3 if learns else 1
    inner = arrays[linear:]
    if all_zero(*cotangents):
        return [None] * len(arrays)
    shape = arrays[1].aval.shape if learns else ()
    pulled = bind(
        PULLED_ROWS,
        *cotangents,
        *inner,
        how=how,
        learns=learns,
        shape=shape,
        implementation=how.implementation,
    )
    return [*pulled, *[None] * len(inner)]


def _pulled_transpose(
    cotangents: Any,
    g: Any,
    *inner: Array,
    how: How,
    learns: bool,
    shape: Any,
    implementation: str,
) -> Any:
    del implementation
    if all_zero(*cotangents):
        return [None] * (1 + len(inner))
    likes = [(g.aval.shape, g.aval.dtype), *[(shape, array.dtype) for array in inner[1:3]]]
    linear = [
        jnp.zeros(*like) if all_zero(cotangent) else cotangent
        for cotangent, like in zip(cotangents, likes, strict=False)
    ]
    return [*bind(PUSHED_ROWS, *linear, *inner, how=how, learns=learns), *[None] * len(inner)]


ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[PUSHED_ROWS] = functools.partial(_composed_jvp, PUSHED_ROWS, _pushed_of)
ad.primitive_jvps[PULLED_ROWS] = functools.partial(_composed_jvp, PULLED_ROWS, _pulled_of)
ad.primitive_transposes[PUSHED_ROWS] = _pushed_transpose
ad.primitive_transposes[PULLED_ROWS] = _pulled_transpose
