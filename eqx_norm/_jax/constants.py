"""Makes the arrays of a new layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Shaped

from .lowering import Size


def full(shape: Sequence[Size], value: ArrayLike, dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Returns an array of this shape, to which `value` is broadcast; outside of a mesh without
    compiling.

    JAX compiles `jnp.full` for each shape, as any operation outside of `jax.jit`, which takes
    40 ms on a CPU, and a new model has many shapes (jax 0.10.2 and 0.12.0.1). It moves an array
    of NumPy as it is.
    """
    # Under `jax.set_mesh` only results of operations are on the mesh. NumPy knows no symbols.
    is_on_mesh = not jax.sharding.get_abstract_mesh().empty
    if is_on_mesh or not all(isinstance(size, int | np.integer) for size in shape):
        return jnp.full(tuple(shape), value, dtype)
    return jax.device_put(np.full(tuple(shape), value, dtype))
