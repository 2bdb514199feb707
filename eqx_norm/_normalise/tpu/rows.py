"""Normalises rows with `implementation="pallas"`, by three primitives:

    rows(x, weight, bias)                     y
    tangent(dx, d_weight, d_bias; x, weight)  the derivative of rows, linear in the first three
    gradients(dy; x, weight)                  the transpose of tangent, linear in dy

On a TPU the first and the last are a kernel each, and all else is computed by the passes of
`Values`. On a CUDA device these compute everything, with their kernel for statistics.

Mapped axes are in front, as in `primitives`. Operands that do not differ have size 1 there, so
`gradients` sums over these axes.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from ..collectives import split
from ..elementwise import Activation, applied
from ..gpu.choice import DTYPES, PARTITIONED, refusal
from ..primitives import Static, bind, new_primitive
from ..reference import summed
from ..values import Values

_PLATFORM = "tpu"


class Norm(NamedTuple):
    """Holds the static arguments of a norm of rows; `dtype` is that of y."""

    eps: float
    centred: bool
    dtype: str


def normalised(
    x: Array,
    mask: Array | None,
    layer: tuple[Array | None, Array | None, Activation | None],
    *,
    eps: float,
    centred: bool,
) -> Array:
    """Returns x, one row, normalised; `layer`: weight, bias, activation. Raises `ValueError` if
    there is no kernel for it."""
    if x.dtype.name not in DTYPES:
        raise refusal(x, f"the kernel takes {', '.join(DTYPES)}", "one row")
    if mask is not None:
        raise refusal(x, "it takes no mask", "one row")
    static, (weight, bias, activation) = Static(x.ndim, 1, "pallas"), layer
    weight = jnp.ones(()) if weight is None else weight
    bias = jnp.zeros(()) if bias is None else bias
    vectors = [jnp.broadcast_to(v.astype(jnp.float32), x.shape) for v in (weight, bias)]

    def rows(dtype: str, *arrays: Array) -> Array:
        return bind(ROWS, *arrays, static=static, norm=Norm(eps, centred, dtype))[0]

    def activated(*arrays: Array) -> Array:
        return applied(activation, rows("float32", *arrays)).astype(x.dtype)

    if activation is None:
        return rows(x.dtype.name, x, *vectors)
    return jax.checkpoint(activated)(x, *vectors)


# --- By the passes. `how` is the `implementation`, and the number of axes of a row.


def _rows(how: Any, x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    implementation, ndim = how
    if x.ndim == ndim:
        values = Values(x, implementation=implementation, groups=1, channels=1)
        used = values.moments(centred=norm.centred)
        return [values.normalise(used, weight, bias, eps=norm.eps, dtype=norm.dtype)]
    arrays = x, weight, bias
    places = [0 if len(a) == len(x) else None for a in arrays]
    arrays = [a[0] if at is None else a for a, at in zip(arrays, places, strict=True)]
    return jax.vmap(functools.partial(_rows, how, norm=norm), places)(*arrays)


def _tangent(how: Any, *arrays: Array, norm: Norm) -> list[Array]:
    *along, x, weight = arrays
    at = x, weight, jnp.zeros_like(along[-1])
    return jax.jvp(functools.partial(_rows, how, norm=norm), at, tuple(along))[1]


def _gradients(
    how: Any, dy: Array, x: Array, weight: Array, *, norm: Norm, shape: Any = None
) -> list[Array]:
    at = [x, *[weight if shape is None else jnp.broadcast_to(weight, shape)] * 2]
    found = jax.vjp(functools.partial(_rows, how, norm=norm), *at)[1]([dy])
    return list(found[: 1 if shape is None else None])


# --- By the kernels.


def _with_kernel(
    of_kernel: Callable[..., Any],
    of_passes: Callable[..., Any],
    platforms: Sequence[str],
    partitioned: bool,
    *arrays: Any,
    norm: Norm,
    **_: Any,
) -> Callable[..., Any]:
    """Returns what computes a primitive; raises `ValueError` if nothing does."""
    if tuple(platforms) == ("cuda",) and norm.centred:
        return functools.partial(of_passes, ("pallas", 2))
    kernel = importlib.import_module(".kernel", __package__)
    x = max(arrays, key=lambda array: array.size)
    if tuple(platforms) != (_PLATFORM,):
        devices = "CUDA devices and TPUs" if norm.centred else "TPUs"
        why_not = f"it is for {devices}, and this program is for {', '.join(platforms)}"
    elif partitioned:
        why_not = PARTITIONED
    elif x.size == 0:
        why_not = "it is empty"
    elif x.shape[-1] > kernel.LONGEST:
        why_not = f"a row of more than {kernel.LONGEST} values may not fit into VMEM"
    else:
        return functools.partial(of_kernel, kernel)
    raise refusal(x, why_not)


def _rows_by(kernel: Any, x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    weight, bias = jnp.broadcast_arrays(weight, bias)
    return _for_each(weight, functools.partial(kernel.rows, norm=norm))(x, weight, bias)


def _gradients_by(
    kernel: Any, dy: Array, x: Array, weight: Array, *, norm: Norm, shape: Any = None
) -> list[Array]:
    weight = weight if shape is None else jnp.broadcast_to(weight, shape)
    run = functools.partial(kernel.gradients, norm=norm, sums=shape is not None)
    return _for_each(weight, run)(dy, x, weight)


def _for_each(weight: Array, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, mapped over the axes along which weights differ."""
    for axis, size in enumerate(weight.shape[:-2]):
        run = jax.vmap(run, axis, axis) if size > 1 else run
    return run


ROWS = new_primitive(
    "rows",
    functools.partial(_rows, ("auto", 2)),
    lambda x, *_, static, norm: [x.update(dtype=jnp.dtype(norm.dtype), weak_type=False)],
    full=[0],
    kernel=functools.partial(_with_kernel, _rows_by, _rows),
)
TANGENT = new_primitive(
    "rows_tangent",
    functools.partial(_tangent, ("auto", 2)),
    lambda dx, *_, static, norm: [dx.update(dtype=jnp.dtype(norm.dtype), weak_type=False)],
    full=[0, 3],
)
GRADIENTS = new_primitive(
    "rows_gradients",
    functools.partial(_gradients, ("auto", 2)),
    lambda dy, x, weight, *, static, norm, shape=None: [
        x.update(weak_type=False),
        *[weight.update(shape=shape, weak_type=False)] * (0 if shape is None else 2),
    ],
    full=[0, 1],
    kernel=functools.partial(_with_kernel, _gradients_by, _gradients),
)


# --- Their derivatives.


def _rows_jvp(primals: Any, tangents: Any, **given: Any) -> Any:
    x, weight, _ = primals
    along = map(ad.instantiate_zeros, tangents)
    return ROWS.bind(*primals, **given), bind(TANGENT, *along, x, weight, **given)


def _jvp(
    primitive: Any, function: Any, primals: Any, tangents: Any, *, static: Static, **given: Any
) -> Any:
    by_passes = functools.partial(function, ("auto", static.ndim), **given)
    _, along = jax.jvp(by_passes, primals, tuple(map(ad.instantiate_zeros, tangents)))
    return primitive.bind(*primals, static=static, **given), along


def _tangent_transpose(cotangents: Any, *operands: Any, **given: Any) -> Any:
    *linear, x, weight = operands
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(operands)
    wanted = [o.aval if ad.is_undefined_primal(o) else None for o in linear]
    if any(wanted[1:]):
        shapes = [like.shape for like in wanted[1:] if like is not None]
        given["shape"] = jnp.broadcast_shapes(weight.shape, *shapes)
    found = bind(GRADIENTS, *cotangents, x, weight, **given)
    # Weight and bias may differ along different axes, and over a mesh be split otherwise.
    found = [
        split(ct.sum(tuple(summed(ct.shape, like.shape)), keepdims=True), like.sharding.spec)
        if like is not None
        else None
        for ct, like in zip(found, wanted, strict=False)
    ]
    return [*found, *[None] * (len(operands) - len(found))]


ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[TANGENT] = functools.partial(_jvp, TANGENT, _tangent)
ad.primitive_jvps[GRADIENTS] = functools.partial(_jvp, GRADIENTS, _gradients)
ad.primitive_transposes[TANGENT] = _tangent_transpose
