"""Checks arguments that are numbers; the caller raises an error that explains the number."""

from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

# Arrays of floats that may be NumPy's, as a count that is known while tracing. NumPy returns
# some of them as scalars, which differ from arrays only for type checkers.
if TYPE_CHECKING:
    Floats: TypeAlias = Array | np.ndarray
else:
    Floats = Float[Array | np.ndarray | np.floating, "..."]
Scalar: TypeAlias = Float[Array | np.ndarray | np.floating | float, ""]


# `Any`, because it converts fields of several types.
def number(value: Any) -> Any:
    """Returns a real number as a `float`; anything else unchanged, also bools and text."""
    if isinstance(value, bool | np.bool_ | str | bytes) or np.iscomplexobj(value):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def array_hint(value: object) -> str:
    """Returns a sentence for the error of a setting that is an array, "" for another value."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        " It is an array, perhaps one of jax.jit or jax.vmap, but settings are parts of the "
        "program: give a Python number, and make one model for each."
    )


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an integer of 1 or more, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return int(value) >= 1


def cast(name: str, value: ArrayLike, dtype: DTypeLike) -> Array:
    """Returns numbers as an array of another dtype; raises `TypeError`, which names them, for
    complex numbers in a real dtype."""
    array = jnp.asarray(value)
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} has dtype {array.dtype}, and would lose its imaginary part in "
            f"{jnp.dtype(dtype)}. Give its real part; or, for complex results, a complex x: "
            "x.astype(jnp.complex64)."
        )
    return array.astype(dtype)


def real_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of the real parts of numbers."""
    return jnp.finfo(dtype).dtype
