"""Normalises rows with `implementation="pallas"`, by three primitives:

    rows(x, weight, bias)                           y
    tangent(dx, d_weight, d_bias; x, weight, bias)  the derivative of rows
    gradients(dy; x, weight, bias)                  the transpose of tangent

`rows` and `gradients` are a kernel each. The passes of `primitives` compute everything else:
forward mode, weights of an ensemble, and gradients of weights for each example.

As in `primitives`, arrays have size 1 along mapped axes over which they are broadcast.
`gradients` sums over these axes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from eqx_norm._normalise import shares
from eqx_norm._normalise.collectives import AxisName
from eqx_norm._normalise.elementwise import in_shape
from eqx_norm._normalise.example_norm import normalise_example
from eqx_norm._normalise.jaxprs import equations
from eqx_norm._normalise.layout import Blocks
from eqx_norm._normalise.lowering import Args, Aval, changed
from eqx_norm._normalise.normalise import Affine
from eqx_norm._normalise.passes import Target, bind, new_primitive
from eqx_norm._normalise.primitives import fitted
from eqx_norm._normalise.row_norm import RowNorm
from eqx_norm._normalise.values import Values

from .choice import kernels, platform, refusal

# The elementwise primitives that kernels compute on both platforms, and calls.
_NAMES = """
abs add add_any and broadcast_in_dim clamp convert_element_type cos custom_jvp_call div eq erf
exp exp2 ge gt integer_pow jit le log logistic lt max min mul ne neg not one_minus_square or
pjit reshard round rsqrt select_n sin sqrt square sub tanh xor
"""
_COMPUTED = frozenset(_NAMES.split())
_DTYPES = {"cuda": "float32 bfloat16 float16", "tpu": "float32 bfloat16"}


def normalise_rows(
    values: Values, affine: Affine, axis_name: AxisName = (), *, eps: float, centred: bool
) -> Array:
    """Returns the result of `normalise_example`, computed by kernels that take each group's
    values as a row; raises `ValueError` if no kernel serves these values."""
    (x, _, mask, layout), (weight, bias, activation) = values, affine
    groups = layout.groups
    refused = functools.partial(refusal, x, axes="one example")
    if mask is not None:
        raise refused("no kernel takes a mask")
    if axis_name != ():
        raise refused(f"no kernel merges the moments of parts along axis_name={axis_name!r}")
    if groups is None:
        raise refused(
            "a kernel normalises adjacent values, not those along the channels (axis=0)"
        )
    norm, rows = RowNorm(eps, centred, activation), (groups, x.size // groups)
    if activation is not None:
        if in_shape(activation, x.shape, rows) is None:
            raise refused(f"activation={activation} does not show that it is elementwise")
        found = equations(norm.derivative(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr)
        if others := {equation.primitive.name for equation in found} - _COMPUTED:
            names = ", ".join(sorted(others))
            raise refused(f"no kernel computes {names}, which activation={activation} needs")

    def like_x(vector: Array | None, default: Array) -> Array:
        if vector is None:
            return default
        shape = x.shape if vector.size == x.size else layout.weights
        vector = vector.reshape(shape).astype(jnp.float32)
        of_rows = vector.size == groups > 1
        return vector if of_rows else jnp.broadcast_to(vector, x.shape)

    one = jnp.ones((1,) * x.ndim, jnp.float32)
    vectors = like_x(weight, one), like_x(bias, 0 * one)
    return bind(ROWS, x, *vectors, blocks=layout.of_moments, norm=norm)[0]


# --- The passes. A row has `ndim` axes: two, once a primitive has flattened the row.


def _forward(*arrays: Array, norm: RowNorm, groups: int, ndim: int = 2) -> list[Array]:
    def row(x: Array, weight: Array, bias: Array) -> Array:
        values = Values.of(x, groups=groups, channels=groups)
        affine = Affine(weight, bias, norm.activation)
        return normalise_example(values, affine, eps=norm.eps, centred=norm.centred)

    axes = ",".join(f"n{i}" for i in range(ndim))
    x, *vectors = arrays
    vectors = [jnp.broadcast_to(v, (*v.shape[:-ndim], *x.shape[-ndim:])) for v in vectors]
    rows = jnp.vectorize(row, signature=f"({axes}),({axes}),({axes})->({axes})")
    return [rows(x, *vectors)]


def _tangent(*arrays: Array, **options: Any) -> list[Array]:
    # An operand and its tangent may be broadcast along different axes.
    along, at = zip(*map(jnp.broadcast_arrays, arrays[:3], arrays[3:]), strict=True)
    return jax.jvp(functools.partial(_forward, **options), at, along)[1]


def _backward(dy: Array, x: Array, *vectors: Array, shape: Any = None, **options: Any) -> Any:
    at = [v if shape is None else jnp.broadcast_to(v, shape) for v in vectors]
    dx, *sums = jax.vjp(functools.partial(_forward, **options), x, *at)[1]([dy])
    return [dx] if shape is None else [dx, *sums]


# --- The kernels.


def _lowered(
    kernel: str,
    passes: Callable[..., list[Array]],
    target: Target,
    *arrays: Array,
    blocks: Blocks,
    norm: RowNorm,
    shape: Any = None,
) -> list[Array]:
    """Returns the results of the kernel of this name, or of the passes; raises `ValueError` if
    neither serves."""
    sums = {} if shape is None else {"shape": blocks.flat(shape)}
    arranged, _ = blocks.arranged(arrays, arrays[0].shape, flat=True)
    x, *vectors = arranged[-3:]
    name = platform(target, x, _DTYPES)
    # A kernel takes one weight and one bias for all examples.
    shapes = *(v.shape for v in vectors), *sums.values()
    if x.size == 0 or any(math.prod(shape[:-2]) > 1 for shape in shapes):
        return passes(*arranged, norm=norm, groups=blocks.number, **sums)
    rows = kernels("tpu_rows" if name == "tpu" else "gpu_rows")
    return getattr(rows, kernel)(*arranged, norm=norm, **sums)


def _lowered_tangent(target: Target, *arrays: Array, blocks: Blocks, norm: RowNorm) -> Any:
    del target
    return _tangent(*arrays, norm=norm, ndim=blocks.ndim, groups=blocks.number)


def _types(first: Aval, *others: Aval, shape: Any = None, **_: object) -> list[Aval]:
    """Returns the types of a primitive's results."""
    return [changed(first), *([] if shape is None else [changed(others[-1], shape=shape)] * 2)]


_new = functools.partial(new_primitive, types=_types, merge=shares.summed_but_first)
ROWS = _new("rows", functools.partial(_lowered, "forward", _forward), full=[0], whole_rows=True)
TANGENT = new_primitive("d_rows", _lowered_tangent, _types, [0, 3])
GRADIENTS = _new(
    "d_rows_t", functools.partial(_lowered, "backward", _backward), full=[0, 1], whole_rows=True
)


# --- The derivatives.


def _rows_jvp(primals: Args, tangents: Args, **parameters: Any) -> Args:
    along = map(ad.instantiate_zeros, tangents)
    return ROWS.bind(*primals, **parameters), bind(TANGENT, *along, *primals, **parameters)


def _tangent_transpose(cotangents: Args, *operands: Any, **parameters: Any) -> Args:
    linear, primals = operands[:3], operands[3:]
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(operands)
    wanted = [o.aval if ad.is_undefined_primal(o) else None for o in linear]
    if any(wanted[1:]):
        shapes = [v.shape for v in (*wanted[1:], *primals[1:]) if v is not None]
        parameters["shape"] = jnp.broadcast_shapes(*shapes)
    gradients = bind(GRADIENTS, *cotangents, *primals, **parameters)
    # Without a `shape`, the only gradient is dx.
    fit = [
        None if v is None else fitted(ct, v) for ct, v in zip(gradients, wanted, strict=False)
    ]
    return [*fit, *[None] * (len(operands) - len(fit))]


def _jvp(
    passes: Callable[..., Any], primals: Args, tangents: Args, *, blocks: Blocks, **options: Any
) -> Args:
    options |= {"ndim": blocks.ndim, "groups": blocks.number}
    function = functools.partial(passes, **options)
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


ad.primitive_jvps[ROWS] = _rows_jvp
ad.primitive_jvps[TANGENT] = functools.partial(_jvp, _tangent)
ad.primitive_jvps[GRADIENTS] = functools.partial(_jvp, _backward)
ad.primitive_transposes[TANGENT] = _tangent_transpose
