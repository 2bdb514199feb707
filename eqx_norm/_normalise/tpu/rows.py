"""Normalises rows with `implementation="pallas"`, by three primitives:

    rows(x, weight, bias)                           y
    tangent(dx, d_weight, d_bias; x, weight, bias)  the derivative of rows
    gradients(dy; x, weight, bias)                  the transpose of tangent

On a TPU the first and the last are a kernel each, and all else is computed by the passes of
`Values`. On a CUDA device these compute everything, with their kernel for statistics.

Arrays are as in `primitives`: of size 1 along mapped axes where they do not differ. `gradients`
sums over these.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from eqx_norm._normalise.gpu.choice import PARTITIONED, refusal
from eqx_norm._normalise.passes import Static, Target, bind, new_primitive
from eqx_norm._normalise.primitives import fitted
from eqx_norm._normalise.values import Values

# Of the 16 MiB of VMEM that a kernel gets, the backward pass takes x, dy and dx twice, and six
# arrays of float32 or so, each of 16 rows at least.
LONGEST = 2**14
_PLATFORM = "tpu"  # tests take a CPU for one


class Norm(NamedTuple):
    """Holds the static arguments of a norm of rows."""

    eps: float
    centred: bool


def normalised_row(
    x: Array, weight: Array | None, bias: Array | None, *, eps: float, centred: bool
) -> Array:
    """Returns x, one row in float32 or bfloat16, normalised."""
    weight = jnp.ones(()) if weight is None else weight
    bias = jnp.zeros(()) if bias is None else bias
    vectors = [jnp.broadcast_to(v.astype(jnp.float32), x.shape) for v in (weight, bias)]
    static = Static(x.ndim, 1, "pallas")
    return bind(ROWS, x, *vectors, static=static, norm=Norm(eps, centred))[0]


# --- By the passes. A row has `ndim` axes: two, once a primitive has flattened it.


def _rows(*arrays: Array, norm: Norm, ndim: int = 2, implementation: str = "auto") -> Any:
    def row(x: Array, weight: Array, bias: Array) -> Array:
        values = Values(x, implementation=implementation, groups=1, channels=1)
        return values.normalised(weight, bias, eps=norm.eps, centred=norm.centred)

    axes = ",".join(f"n{i}" for i in range(ndim))
    return [jnp.vectorize(row, signature=f"({axes}),({axes}),({axes})->({axes})")(*arrays)]


def _tangent(*arrays: Array, **options: Any) -> Any:
    # An operand and its tangent may differ along different axes.
    along, at = zip(*map(jnp.broadcast_arrays, arrays[:3], arrays[3:]), strict=True)
    return jax.jvp(functools.partial(_rows, **options), at, along)[1]


def _gradients(dy: Array, x: Array, *vectors: Array, shape: Any = None, **options: Any) -> Any:
    at = [v if shape is None else jnp.broadcast_to(v, shape) for v in vectors]
    dx, *sums = jax.vjp(functools.partial(_rows, **options), x, *at)[1]([dy])
    return [dx] if shape is None else [dx, *sums]


# --- By the kernels.


def _lowered(
    kernel: str,
    passes: Callable[..., Any],
    target: Target,
    *arrays: Array,
    static: Static,
    norm: Norm,
    shape: Any = None,
) -> Any:
    """Returns the results of the kernel of this name, or of the passes; raises `ValueError` if
    neither serves."""
    sums = {} if shape is None else {"shape": static.flat(shape)}
    arranged, _ = static.arranged(arrays, arrays[0].shape, flat=True)
    x, weight, bias = arranged[-3:]
    if tuple(target.platforms) != (_PLATFORM,):
        return passes(*arranged, norm=norm, implementation="pallas", **sums)
    if target.is_partitioned or x.shape[-1] > LONGEST:
        too_long = f"a row of more than {LONGEST} values may not fit into VMEM"
        raise refusal(x, PARTITIONED if target.is_partitioned else too_long)
    # A kernel takes one weight and one bias for all rows.
    shapes = weight.shape, bias.shape, *sums.values()
    if x.size == 0 or any(n > 1 for shape in shapes for n in shape[:-1]):
        return passes(*arranged, norm=norm, **sums)
    kernels = importlib.import_module(".kernel", __package__)
    return getattr(kernels, kernel)(*arranged, norm=norm, **sums)


def _lowered_tangent(target: Target, *arrays: Array, static: Static, norm: Norm) -> Any:
    del target
    return _tangent(*arrays, norm=norm, ndim=static.ndim)


def _types(first: Any, *others: Any, shape: Any = None, **_: Any) -> list[Any]:
    """Returns the types of a primitive's results."""
    sums = [] if shape is None else [others[-1].update(shape=shape, weak_type=False)] * 2
    return [first.update(weak_type=False), *sums]


ROWS = new_primitive("rows", functools.partial(_lowered, "rows", _rows), _types, [0])
TANGENT = new_primitive("d_rows", _lowered_tangent, _types, [0, 3])
GRADIENTS = new_primitive(
    "d_rows_t", functools.partial(_lowered, "gradients", _gradients), _types, [0, 1]
)


# --- Their derivatives.


def _rows_jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
    along = map(ad.instantiate_zeros, tangents)
    return ROWS.bind(*primals, **parameters), bind(TANGENT, *along, *primals, **parameters)


def _tangent_transpose(cotangents: Any, *operands: Any, **parameters: Any) -> Any:
    linear, primals = operands[:3], operands[3:]
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(operands)
    wanted = [o.aval if ad.is_undefined_primal(o) else None for o in linear]
    if any(wanted[1:]):
        shapes = [v.shape for v in (*wanted[1:], *primals[1:]) if v is not None]
        parameters["shape"] = jnp.broadcast_shapes(*shapes)
    gradients = bind(GRADIENTS, *cotangents, *primals, **parameters)
    # Without sums only dx is found.
    fit = [
        None if v is None else fitted(ct, v) for ct, v in zip(gradients, wanted, strict=False)
    ]
    return [*fit, *[None] * (len(operands) - len(fit))]


def _jvp(
    passes: Callable[..., Any], primals: Any, tangents: Any, *, static: Static, **options: Any
) -> Any:
    function = functools.partial(passes, ndim=static.ndim, **options)
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[TANGENT] = functools.partial(_jvp, _tangent)
ad.primitive_jvps[GRADIENTS] = functools.partial(_jvp, _gradients)
ad.primitive_transposes[TANGENT] = _tangent_transpose
