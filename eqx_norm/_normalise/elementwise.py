"""Analyses and applies functions of each normalised value: activations, weights per value."""

import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.tree_util import Partial
from jaxtyping import Array

from .arithmetic import Arithmetic
from .jaxprs import CALLS, equations
from .primitives import AFFINE, Static, bind
from .reference import Activation


class Affine(eqx.Module):
    """Computes `activation(bias + weight * xhat)`, with one weight and bias for each value."""

    weight: Array | None
    bias: Array | None
    activation: Activation | None
    arithmetic: Arithmetic = eqx.field(static=True)

    def __call__(self, xhat: Array) -> Array:
        y = self._affine(xhat)
        return y if self.activation is None else self.activation(y)

    def _affine(self, xhat: Array) -> Array:
        if self.weight is None:
            return xhat if self.bias is None else xhat + self.bias.astype(xhat.dtype)
        weight = self.weight.astype(xhat.dtype)
        bias = jnp.zeros_like(weight) if self.bias is None else self.bias.astype(xhat.dtype)
        if jnp.iscomplexobj(xhat):
            return bias + weight * xhat
        # The primitive, so that the gradients of both are summed in one pass.
        zero = jnp.zeros((1,) * xhat.ndim, xhat.dtype)
        static = Static(xhat.ndim, self.arithmetic, has_channels=False)
        return bind(AFFINE, bias, weight, xhat, zero, zero, static=static)[0]


def as_tree(activation: Activation | None) -> Activation | None:
    """Returns the activation as a layer's field: a tree, so that it passes through `jax.jit`.

    **Raises:** `ValueError` for what JAX cannot call.
    """
    if isinstance(activation, np.ufunc):
        raise ValueError(
            f"activation={activation!r} is NumPy's and cannot be traced by JAX. Write "
            f"activation=jax.numpy.{activation.__name__}."
        )
    if activation is not None and not callable(activation):
        raise ValueError(
            f"activation={activation!r} cannot be called. Give the function itself, for "
            "example activation=jax.nn.relu."
        )
    is_tree = activation is None or isinstance(activation, eqx.Module | Partial)
    return cast(Any, activation) if is_tree else Partial(activation)


def function(activation: Activation | None) -> Activation | None:
    """Returns the activation that `as_tree` was given."""
    if isinstance(activation, Partial):
        return activation if activation.args or activation.keywords else activation.func
    return activation


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def recomputed(
    function: Any, static: Static, arrays: list[Array], u: Array, *operands: Any
) -> Array:
    """Returns `function(u, *arrays)`. For its derivative u is not kept, but computed again: it
    is `affine(*operands)`."""
    del static, operands
    return function(u, *arrays)


def is_pure(activation: Activation, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Returns whether a pass can compute the activation, value by value and again.

    It can if the activation has no arrays of its own, which might have to be differentiated,
    and is seen to treat each value alike and alone. Any other is a function of an example.

    **Raises:** `ValueError` where it does not keep an example's `shape`.
    """
    has_arrays = any(eqx.is_array(leaf) for leaf in jax.tree.leaves(activation))
    if not has_arrays and _is_elementwise(activation, shape, dtype):
        return True
    try:
        result: Any = jax.eval_shape(activation, jax.ShapeDtypeStruct(shape, dtype))
    except Exception as error:  # whatever the user's function raises
        result = error
    if getattr(result, "shape", None) != shape:
        raise ValueError(
            f"activation={activation} must be elementwise: given an array of shape {shape}, it "
            f"has to return one of the same shape, but here it is {result!r}. Apply it after "
            "the layer instead."
        )
    return False


def has_forward_derivative(
    activation: Activation, shape: tuple[int, ...], dtype: jnp.dtype
) -> bool:
    """Returns whether JAX can push a tangent through it: not so through a `jax.custom_vjp`."""
    u = jax.ShapeDtypeStruct(shape, dtype)
    try:
        closed = jax.make_jaxpr(lambda u, du: jax.jvp(activation, (u,), (du,)))(u, u)
    except (TypeError, ValueError, NotImplementedError):
        return False
    # A `custom_vjp` leaves this in place of its tangent, and refuses to evaluate it. Searched
    # as text, it is found in nested calls, too (with jax 0.10.2 and 0.12.0.1).
    return "custom_lin[" not in str(closed)


def _is_elementwise(activation: Activation, own: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Returns whether it does the same to each value, whatever array that is in.

    It does if, traced on its `own` shape and on two others, it takes the same steps, each of
    them elementwise. (On a single number all functions would be so.)
    """
    steps = []
    for shape in ((2, 3), (3, 5, 2), own):
        try:
            closed = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(shape, dtype))
        except Exception:  # the user's function, which need not take these shapes
            return False
        is_kept = [result.aval.shape for result in closed.jaxpr.outvars] == [shape]
        if not is_kept or closed.consts:
            return False
        steps.append([_step(equation) for equation in equations(closed.jaxpr)])
    return steps[0] == steps[1] == steps[2] and None not in steps[0]


def _step(equation: Any) -> Any:
    """Returns what an equation does but for its shapes, or `None` if it may mix values."""
    name = equation.primitive.name
    # A broadcast of one number is a constant: what depends on the values is larger.
    is_constant = name == "broadcast_in_dim" and equation.invars[0].aval.size == 1
    if not (is_constant or name in CALLS or name in NAMES):
        return None
    constants = [str(a.val) for a in equation.invars if isinstance(a, Literal)]
    parameters = [
        str(equation.params.get(key)) for key in ("y", "new_dtype", "rounding_method")
    ]
    return name, constants, parameters


_TEXT = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
igamma igammac integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not one_minus_square or pow regularized_incomplete_beta rem round rsqrt select_n sign
sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
# The names of JAX's elementwise primitives.
NAMES = frozenset(_TEXT.split())
