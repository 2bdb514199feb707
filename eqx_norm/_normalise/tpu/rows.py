"""Normalises rows with `implementation="pallas"`, by three primitives:

    rows(x, weight, bias)                           y
    tangent(dx, d_weight, d_bias; x, weight, bias)  the derivative of rows
    gradients(dy; x, weight, bias)                  the transpose of tangent

On a TPU the first and the last are a kernel each, and all else is computed by the passes of
`Values`. On a CUDA device these compute everything, with their kernel for statistics.

Mapped axes are in front, as in `primitives`. Operands that do not differ have size 1 there, so
`gradients` sums over these axes.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from eqx_norm._normalise.elementwise import Activation, applied
from eqx_norm._normalise.gpu.choice import DTYPES, PARTITIONED, refusal
from eqx_norm._normalise.jaxprs import equations
from eqx_norm._normalise.primitives import Static, bind, fitted, new_primitive
from eqx_norm._normalise.values import Values

_PLATFORM = "tpu"  # tests take a CPU for one
# The elementwise primitives that Mosaic compiles (jax 0.10.2 and 0.12.0.1).
_TEXT = """
abs add add_any and broadcast_in_dim clamp convert_element_type copy custom_jvp_call div eq exp
exp2 ge gt integer_pow jit le log log1p logistic lt max min mul ne neg not one_minus_square or
pjit pow rsqrt select_n sqrt square stop_gradient sub tanh xor
"""
_MOSAIC = frozenset(_TEXT.split())


class Norm(NamedTuple):
    """Holds the static arguments of a norm of rows; `dtype` is that of y."""

    eps: float
    centred: bool
    dtype: str
    activation: Activation | None


def normalised_row(
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

    def rows(dtype: str, activation: Activation | None, *arrays: Array) -> Array:
        norm = Norm(eps, centred, dtype, activation)
        return bind(ROWS, *arrays, static=static, norm=norm)[0]

    def activated(*arrays: Array) -> Array:
        return applied(activation, rows("float32", None, *arrays)).astype(x.dtype)

    if activation is None or _fits(activation, x):
        return rows(x.dtype.name, activation, x, *vectors)
    return jax.checkpoint(activated)(x, *vectors)


def _fits(activation: Activation, x: Array) -> bool:
    """Returns whether a kernel can compute the activation and its derivative."""

    def both(u: Array, g: Array) -> Any:
        return jax.vjp(functools.partial(applied, activation), u)[1](g)

    if any(map(eqx.is_array, jax.tree.leaves(activation))):
        return False
    jaxpr = jax.make_jaxpr(both)(*[jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2)
    return not jaxpr.consts and {e.primitive.name for e in equations(jaxpr.jaxpr)} <= _MOSAIC


# --- By the passes. `how` is the `implementation`, and the number of axes of a row.


def _rows(how: Any, x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    implementation, ndim = how
    if x.ndim == ndim:
        values = Values(x, implementation=implementation, groups=1, channels=1)
        used = values.moments(centred=norm.centred)
        how = {"eps": norm.eps, "dtype": norm.dtype, "activation": norm.activation}
        return [values.normalise(used, weight, bias, **how)]
    arrays = x, weight, bias
    places = [0 if len(a) == len(x) else None for a in arrays]
    arrays = [a[0] if at is None else a for a, at in zip(arrays, places, strict=True)]
    return jax.vmap(functools.partial(_rows, how, norm=norm), places)(*arrays)


def _tangent(how: Any, *arrays: Array, norm: Norm) -> list[Array]:
    # An operand and its tangent may differ along different axes.
    along, at = zip(*map(jnp.broadcast_arrays, arrays[:3], arrays[3:]), strict=True)
    return jax.jvp(functools.partial(_rows, how, norm=norm), at, along)[1]


def _gradients(
    how: Any, dy: Array, x: Array, *vectors: Array, norm: Norm, shape: Any = None
) -> list[Array]:
    at = [v if shape is None else jnp.broadcast_to(v, shape) for v in vectors]
    found = jax.vjp(functools.partial(_rows, how, norm=norm), x, *at)[1]([dy])
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
    x = arrays[-3]
    if tuple(platforms) != (_PLATFORM,):
        devices = "CUDA devices and TPUs" if norm.centred else "TPUs"
        why_not = f"it is for {devices}, and this program is for {', '.join(platforms)}"
    elif partitioned:
        why_not = PARTITIONED
    elif x.dtype == jnp.float16:
        why_not = "Mosaic compiles no float16 for a TPU"
    elif x.size == 0:
        why_not = "it is empty"
    elif x.shape[-1] > kernel.LONGEST:
        why_not = f"a row of more than {kernel.LONGEST} values may not fit into VMEM"
    else:
        return functools.partial(of_kernel, kernel)
    raise refusal(x, why_not, "mapped axes, 1, values")


def _rows_by(kernel: Any, x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    weight, bias = jnp.broadcast_arrays(weight, bias)
    return _for_each(weight, functools.partial(kernel.rows, norm=norm))(x, weight, bias)


def _gradients_by(
    kernel: Any, dy: Array, x: Array, *vectors: Array, norm: Norm, shape: Any = None
) -> list[Array]:
    whole = shape or jnp.broadcast_shapes(*(v.shape for v in vectors))
    weight, bias = (jnp.broadcast_to(v, whole) for v in vectors)
    run = functools.partial(kernel.gradients, norm=norm, sums=shape is not None)
    return _for_each(weight, run)(dy, x, weight, bias)


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
    kernel=lambda *_, **given: functools.partial(_tangent, ("auto", 2)),
)
GRADIENTS = new_primitive(
    "rows_gradients",
    functools.partial(_gradients, ("auto", 2)),
    lambda dy, x, weight, bias, *, static, norm, shape=None: [
        x.update(weak_type=False),
        *[weight.update(shape=shape, weak_type=False)] * (0 if shape is None else 2),
    ],
    full=[0, 1],
    kernel=functools.partial(_with_kernel, _gradients_by, _gradients),
)


# --- Their derivatives.


def _rows_jvp(primals: Any, tangents: Any, **given: Any) -> Any:
    along = map(ad.instantiate_zeros, tangents)
    return ROWS.bind(*primals, **given), bind(TANGENT, *along, *primals, **given)


def _jvp(
    primitive: Any, function: Any, primals: Any, tangents: Any, *, static: Static, **given: Any
) -> Any:
    by_passes = functools.partial(function, ("auto", static.ndim), **given)
    _, along = jax.jvp(by_passes, primals, tuple(map(ad.instantiate_zeros, tangents)))
    return primitive.bind(*primals, static=static, **given), along


def _tangent_transpose(cotangents: Any, *operands: Any, **given: Any) -> Any:
    linear, primals = operands[:3], operands[3:]
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(operands)
    wanted = [o.aval if ad.is_undefined_primal(o) else None for o in linear]
    if any(wanted[1:]):
        shapes = [v.shape for v in (*wanted[1:], *primals[1:]) if v is not None]
        given["shape"] = jnp.broadcast_shapes(*shapes)
    found = bind(GRADIENTS, *cotangents, *primals, **given)
    # Without sums only dx is found.
    fit = [None if v is None else fitted(ct, v) for ct, v in zip(found, wanted, strict=False)]
    return [*fit, *[None] * (len(operands) - len(fit))]


ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[TANGENT] = functools.partial(_jvp, TANGENT, _tangent)
ad.primitive_jvps[GRADIENTS] = functools.partial(_jvp, GRADIENTS, _gradients)
ad.primitive_transposes[TANGENT] = _tangent_transpose
