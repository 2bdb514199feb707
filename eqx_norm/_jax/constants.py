"""Makes the arrays of a new layer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Shaped


def full(shape: tuple[int, ...], value: ArrayLike, dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Returns an array of a value, which broadcasts to the shape, without compiling.

    JAX compiles `jnp.full` for each shape, as any operation outside of `jax.jit`, which takes
    40 ms on a CPU, and a new model has many shapes (jax 0.10.2 and 0.12.0.1). It moves an array
    of NumPy as it is.
    """
    array = np.full(shape, value, dtype)
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(array)
    # Under `jax.set_mesh` only results of operations are on the mesh.
    return jnp.asarray(array)
