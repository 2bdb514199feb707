"""Checks the arguments that several layers share."""

import functools
import math
from collections.abc import Hashable, Iterator

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Inexact, PyTree, Shaped

from eqx_norm._contract import described
from eqx_norm._memory import ENSEMBLE
from eqx_norm._normalise import Activation, Affine, AxisName, Shape, names_of, upcast
from eqx_norm.strategies._numbers import array_hint, is_count, number

# The derivative of 1 / sqrt(variance + eps) can reach eps**-1.5, or 30 of the 38 decades of
# float32. The other 8 are for the factors that the derivative is multiplied by.
_LEAST = {"eps": 1e-20}


def checked_number(argument: str, value: object) -> float:
    """Returns a number as a `float`; raises `ValueError` unless it is finite and large enough
    for this argument."""
    result = number(value)
    least = _LEAST.get(argument, -math.inf)
    if not (isinstance(result, float) and math.isfinite(result) and result >= least):
        bound = f", at least {least}, as 1e-5" if argument in _LEAST else ""
        raise ValueError(
            f"{argument}={value!r}: it must be a finite number{bound}." + array_hint(value)
        )
    return result


def checked_size(argument: str, value: object, given: object = None) -> int:
    """Returns a size as an `int`. Raises `ValueError` if `value` is no size; the error quotes
    the value, or the sequence `given` that contains the value."""
    if not is_count(value):
        quoted = value if given is None else given
        raise ValueError(f"{argument}={quoted!r}: a size must be an int of 1 or more.")
    return int(value)


def checked_names(**arguments: object) -> list[AxisName]:
    """Returns names of axes, or tuples of names; raises `ValueError` for a value that is no
    name, and for a name that is given twice."""
    # A list of names would make the layer unhashable.
    axes: list[AxisName] = [
        tuple(axis) if isinstance(axis, list) else axis for axis in arguments.values()
    ]
    quoted = " and ".join(f"{name}={value!r}" for name, value in arguments.items())
    names = [name for axis in axes for name in names_of(axis)]
    for name in names:
        if name is None or not isinstance(name, Hashable) or isinstance(name, Iterator):
            raise ValueError(
                f"{quoted}: {name!r} is no name of an axis. Give the name that jax.vmap or the "
                "mesh has, such as axis_name='batch', or a tuple of names."
            )
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        hint = "."
        if len(axes) > 1:
            hint = (
                ": statistics over axis_name= are remembered anyway, and memory_axis_name= is "
                "only for the axes along which batches are normalised separately."
            )
        raise ValueError(
            f"{quoted} name {', '.join(map(repr, repeated))} more than once. Give each name "
            f"once{hint}"
        )
    return axes


def weight_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype of weight and bias: the one given, or the default float dtype. Raises
    `ValueError` for integers and booleans."""
    result = jnp.result_type(float) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(result, jnp.inexact):
        raise ValueError(
            f"dtype={result.name}: weight and bias are learnt by gradients, so they must be "
            "float or complex. Write dtype=jnp.float32, or leave it out."
        )
    return result


def checked_activation(activation: Activation | None) -> Activation | None:
    """Returns the activation; raises `ValueError` for a NumPy function, and for an object that
    is not callable."""
    if activation is None:
        return None
    if isinstance(activation, np.ufunc) or not callable(activation):
        raise ValueError(
            f"activation={activation!r} is no function that JAX can trace. Give the function "
            "itself, and JAX's, not NumPy's: for example activation=jax.numpy.tanh."
        )
    return activation


def comparable(activation: Activation | None) -> Activation | None:
    """Returns the activation; a `functools.partial`, which equals only itself, as a `Partial`,
    a pytree with the arguments as leaves."""
    if isinstance(activation, functools.partial):
        return Partial(activation.func, *activation.args, **activation.keywords)
    return activation


def affine(
    layer: PyTree,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    shape: Shape,
    x: Inexact[Array, "..."],
) -> Affine:
    """Returns the weight (with the offset added), the bias and the activation for a call. The
    weight and bias given replace the layer's own, of `shape`. Raises `ValueError` or
    `TypeError` for arrays that do not fit."""
    gamma = _weight_or_bias(layer, "weight", weight, shape, x)
    beta = _weight_or_bias(layer, "bias", bias, shape, x)
    if gamma is not None and layer.weight_offset != 0:
        gamma = layer.weight_offset + upcast(gamma)
    return Affine(gamma, beta, comparable(layer.activation))


def _weight_or_bias(
    layer: PyTree, name: str, given: ArrayLike | None, shape: Shape, x: Inexact[Array, "..."]
) -> Shaped[Array, "..."] | None:
    if given is not None:
        return _checked_given(name, given, shape, x)
    own = getattr(layer, name)
    own_shape = np.shape(own)
    if own is None or own_shape == shape:
        return own
    fix = f"Put such a one there by eqx.tree_at, or write layer(x, {name}={name})."
    axes_in_front = len(own_shape) - len(shape)
    if axes_in_front > 0 and own_shape[axes_in_front:] == shape:
        fix = f"{ENSEMBLE} If not: {fix}"
    raise ValueError(
        f"The layer's own {name} has shape {own_shape}, but for x of shape {x.shape} it must "
        f"have the shape {shape}. {fix}"
    )


def _checked_given(
    name: str, given: ArrayLike, shape: Shape, x: Inexact[Array, "..."]
) -> Inexact[Array, "..."]:
    """Returns the weight or bias of a call as an array; raises unless it is inexact and has
    this shape or that of x."""
    array = jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name}= has dtype {array.dtype}, and x has {x.dtype}: give floats, or a "
            f"complex {name} for complex x. Write {name}.astype({x.dtype})."
        )
    if array.shape in (shape, x.shape):
        return array
    fix = (
        f"If all examples share it, write jax.vmap(lambda x: layer(x, {name}={name}))(x); "
        f"if not, jax.vmap(lambda x, {name}: layer(x, {name}={name}))(x, {name})."
    )
    if array.size == math.prod(shape):
        fix = f"Write {name}.reshape({shape})."
    allowed = str(shape) if shape == x.shape else f"{shape} or {x.shape}"
    raise ValueError(
        f"{name}= has shape {array.shape}, but for x of shape {x.shape} it must have the shape "
        f"{allowed}. {fix}"
    )


def example_shape_error(
    x: Inexact[Array, "..."], argument: str, value: object, shape: object, fix: str | None
) -> ValueError:
    """Returns the error for an `x` that does not have the `shape` that `argument` set when the
    layer was made. `fix` says what to do; by default, to make another layer."""
    if fix is None:
        fix = f"Make the layer with the {argument}= of its input."
    return ValueError(
        f"x has shape {x.shape}, but this layer was made with {argument}={value} and takes one "
        f"example at a time, of shape {shape}. {fix}"
    )


def check_channels(
    x: Inexact[Array, "..."], argument: str, channels: int | None, mapped: str
) -> None:
    """Raises `ValueError` unless x is `(channels, *spatial)`; `None` allows any number."""
    if x.ndim == 0 or channels not in (None, x.shape[0]):
        fix = None
        if x.ndim > 1 and x.shape[1] == channels:
            fix = f"This looks like a batch: map over it, {mapped}."
        elif x.ndim > 1 and x.shape[-1] == channels:
            fix = "Its channels are last: move them to the front, jnp.moveaxis(x, -1, 0)."
        raise example_shape_error(x, argument, channels, f"({channels}, *spatial)", fix)


def checked_x(x: object, name: str = "x") -> Inexact[Array, "..."]:
    """Returns `x` as an array; raises `TypeError` if `x` is no array, and for integers. `name`
    is the name of the argument."""
    array = _as_array(x)
    if array is None:
        fix = f"If it holds numbers, write jnp.asarray({name})."
        if isinstance(x, tuple):
            fix = (
                "A layer with a state returns two things, of which only the first goes to the "
                "next: write y, state = layer(x, state)."
            )
        raise TypeError(f"{name} is {described(x)}, and must be one array. {fix}")
    # Without x64, `asarray` converts NumPy's float64 to float32.
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name} has dtype {_given_dtype(x)}, which cannot hold normalised values. "
            f"Write {name}.astype(jnp.float32)."
        )
    return array


def _as_array(x: PyTree) -> Shaped[Array, "..."] | None:
    if isinstance(x, tuple | list):
        return None
    try:
        return jnp.asarray(x)
    except TypeError:
        return None


def _given_dtype(array: PyTree) -> np.dtype:
    """Returns the dtype of an argument as the user wrote it: `asarray` may have another."""
    return array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype


def checked_bools(mask: ArrayLike) -> Bool[Array, "..."]:
    """Returns a mask as an array; raises `TypeError` unless it has booleans."""
    array = jnp.asarray(mask)
    if array.dtype != bool:
        raise TypeError(
            f"mask has dtype {_given_dtype(mask)}, but must say which values count: give "
            "booleans, for example mask > 0."
        )
    return array


def checked_mask(
    mask: ArrayLike | None,
    x: Inexact[Array, "*example"],
    mapped: str,
    *,
    per_value: bool = False,
) -> Bool[Array, "..."] | None:
    """Returns `mask` as an array; raises unless it has one boolean for the example or for each
    position of `x`; if `per_value`, for each value. `mapped` shows how to call the layer."""
    if mask is None:
        return None
    mask = checked_bools(mask)
    if per_value:
        fits = mask.shape in ((), x.shape)
        each = f"value, of shape {x.shape}: for rows, jnp.broadcast_to(mask[:, None], x.shape)"
    else:
        fits = broadcasts(mask.shape, x.shape[1:])
        each = f"position, of shape {x.shape[1:]}; the channels share it"
    if not fits:
        alternative = f", or one for each {each}"
        if x.ndim == 1 and not per_value:
            alternative = ", which its channels share"
        raise ValueError(
            f"mask has shape {mask.shape}, but one example of x has the shape {x.shape}: give "
            f"one bool for the example, of shape (){alternative}. Map over the mask as over x: "
            f"{mapped}."
        )
    return mask


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Returns whether an array of one shape broadcasts to another shape."""
    try:
        return jnp.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
